"""One planned call: arguments in, raw values to JAX, changed values back.

A plan is made of what `outside.Call` found out about its arguments, for calls with
arguments like these: the signature, the Variables, the groups of leaves. With one, a
call reads the raw values of the Variables, calls what JAX compiled with them, and
writes the values that the function changed into their Variables. Which these are was
decided when the function was traced, and comes back as static data of the result. If
the result contains objects or a change of structure, `outside.commit` does the same.

Variables that are arguments by themselves, in a State, a list, or alone, may be new
ones at each call: a plan is right for them if they are like those that it was made for
(`LooseVariables`). Containers of them are read as their first ones were (`make`).
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from graftree.core import paths
from graftree.core.graph import merging, nodes, watches
from graftree.core.graph.flattening import IndexMap
from graftree.core.graph.nodes import GraphKind, Leaf
from graftree.core.graph.watches import Attribute
from graftree.core.states.states import State
from graftree.core.variables import variables
from graftree.core.variables.variables import Variable
from graftree.transforms.crossing import outside, packing
from graftree.transforms.crossing.inside import Returned
from graftree.transforms.crossing.packing import Packed, Values
from graftree.transforms.crossing.rows import Row

# Stands for the result of a call that has no plan.
NO_PLAN: Any = object()


class Arguments(NamedTuple):
    """Arguments as a plan sees them.

    Attributes:
        key: What a plan is found by.
        tree: ``(args, kwargs)``, without the static ones.
        leaves: The leaves of the tree: objects, Variables, arrays and other values.
    """

    key: tuple[Any, ...]
    tree: Any
    leaves: Sequence[Any]

    def objects(self) -> list[Any]:
        """Those leaves that are objects."""
        return [x for x in self.leaves if nodes.is_node_module(x)]

    def variables(self) -> list[Any]:
        """Those leaves that are Variables."""
        return [x for x in self.leaves if nodes.kind_of(x) is Leaf.VARIABLE]


class Watcher(Protocol):
    """Tells whether what a plan depends on besides its leaves is as it was."""

    def holds(self) -> bool:
        """Whether nothing has changed."""
        ...


class Plan:
    """What is known about a call with certain objects.

    Of Variables that are arguments by themselves it only knows what they are like.

    Args:
        row: The transform.
        leaves: What of the arguments is given to `call`.
        packed: The call that the plan is made of.
        watcher: Tells whether the plan still holds.
        loose: What the Variables among the leaves are like.
        sources: Where what is no Variable comes from; see `sources`.
        roots: The objects among the leaves.

    Attributes:
        signature: The static part of the arguments.
        traces: Where traces are noted, if they are.
        types: The types of the leaves.
        roots: The objects among the leaves, weakly, with their places.
        given: The places of the leaves that are neither objects nor Variables.
        outline: How to make what JAX gets, if that and the result are made of objects
            and given leaves alone; ``None`` if there is more to it.
    """

    def __init__(
        self,
        row: Row,
        leaves: Sequence[Any],
        packed: Packed,
        watcher: Watcher,
        loose: LooseVariables,
        sources: Mapping[int, Any],
        roots: Sequence[weakref.ref[Any]] = (),
    ) -> None:
        self.signature = packed.signature
        self.traces = row.traces
        self.types = [*map(type, leaves)]
        self._row = row
        self._watcher = watcher
        kinds = [*map(nodes.kind_of, leaves)]
        are_objects = enumerate(map(nodes.is_node_module, leaves))
        found_at = [place for place, is_object in are_objects if is_object]
        self.roots = [*zip(found_at, roots, strict=True)]
        self.given = _places(kinds, Leaf.ARRAY, Leaf.STATIC)
        boxes = _places(kinds, Leaf.VARIABLE)
        self._loose = loose if boxes else None
        self._pick_loose = _picker(boxes)
        # Where the leaves for JAX come from.
        places = {id(leaves[place]): n for n, place in enumerate(boxes)}
        self._loose_positions = {
            position: places[id(leaf)]
            for position, leaf in enumerate(packed.leaves)
            if id(leaf) in places
        }
        self._sources = sources
        self._reads_attributes = any(s is not GIVEN for s in sources.values())
        # Variables of objects, and None for all other leaves.
        self._leaves = [
            x if isinstance(x, Variable) and id(x) not in places else None
            for x in packed.leaves
        ]
        objects = [*packed.objects.values()]
        self._objects = [None if id(x) in places else _weakly(x) for x in objects]
        self._loose_objects = [
            (number, places[id(x)])
            for number, x in enumerate(objects)
            if id(x) in places
        ]
        attached = [x for x in self._leaves if x is not None]
        self.is_plain = variables.may_replace_all(attached, ())
        self._groups = None
        if not row.inputs.reads_leaves:
            self._groups = [
                self._group(group)
                for group in outside.groups(row, packed, [*range(len(packed.leaves))])
            ]
        self._targets: tuple[Returned | None, Sequence[Any]] = (None, ())
        self._may_donate_twice = bool(row.inputs.donated) and any(
            map(outside.is_spread, packed.values())
        )
        self.outline = None if row.has_prefixes else self._outlined()

    def _outlined(self) -> _Outline | None:
        groups = self._groups
        if groups is None or not self.is_plain or self._reads_attributes:
            return None
        if self._may_donate_twice:
            return None
        if any(group.pick_loose or group.order for group in groups):
            return None
        parts = [
            (
                group.attached,
                [(place, self.given[number]) for place, number in group.inserts],
                group.static,
            )
            for group in groups
        ]
        return _Outline([*enumerate(self.types)], parts)

    def call(self, jitted: Callable[..., Any], leaves: Sequence[Any]) -> Any:
        """What a call with leaves of these types gives; `NO_PLAN` if it isn't right."""
        # In the key they stand as what is theirs alone, if nobody copied `vars(root)`.
        for place, weak in self.roots:
            if weak() is not leaves[place]:
                return NO_PLAN
        boxes = values = ()
        if self._loose is not None:
            boxes = self._pick_loose(leaves)
            values = self._loose.read(boxes)
        if values is None or not self._watcher.holds():
            return NO_PLAN
        given = [leaves[place] for place in self.given]
        groups = self.groups(given, boxes, values)
        if self._may_donate_twice and outside.donates_twice(self._row, groups):
            return NO_PLAN
        result = jitted(*groups)
        return self.commit(result, given, boxes)

    def groups(
        self,
        given: Sequence[Any],
        boxes: Sequence[Variable[Any]],
        loose_values: Sequence[Any],
    ) -> Sequence[Values]:
        """What JAX gets."""
        if self._groups is None:
            packed = self.packed(given, boxes)
            return outside.groups(self._row, packed, packed.values())
        others = self._others(given) if self._reads_attributes else given
        groups = []
        for group in self._groups:
            values = variables.read_all(group.attached)
            if group.pick_loose is not None:
                values += group.pick_loose(loose_values)
            if group.order is not None:
                values = [*group.order(values)]
            for place, number in group.inserts:
                values.insert(place, others[number])
            groups.append(Values((values, group.static)))
        return groups

    def commit(
        self, result: Any, given: Sequence[Any], boxes: Sequence[Variable[Any]]
    ) -> Any:
        """`outside.commit`; less to do if only Variables are written and returned."""
        returned, changed, _, out = result
        if not (self.is_plain and returned.is_plain):
            return outside.commit(self.packed(given, boxes), result)
        positions, _, numbers = returned.groups
        if positions:
            targets = self.targets(returned, boxes)
            # Those of objects were asked when the plan was made.
            if boxes and not variables.may_replace_all(targets, ()):
                return outside.commit(self.packed(given, boxes), result)
            variables.replace_all(targets, outside.joined(changed, positions))
        leaves = outside.joined(out, numbers)
        if returned.variables:
            leaves = self._with_variables(returned, boxes, leaves)
        return returned.unflatten(leaves)

    def targets(
        self, returned: Returned, boxes: Sequence[Variable[Any]]
    ) -> Sequence[Any]:
        """The Variables that a result with this static part changes."""
        if boxes:
            leaves = self._with_loose(boxes)
            return [leaves[position] for position in returned.changed]
        # The same ones in each step, mostly.
        latest = self._targets
        if latest[0] is not returned:
            picked = [self._leaves[position] for position in returned.changed]
            self._targets = latest = (returned, picked)
        return latest[1]

    def _with_variables(
        self,
        returned: Returned,
        boxes: Sequence[Variable[Any]],
        leaves: Sequence[Any],
    ) -> Sequence[Any]:
        """The leaves of an output with its Variables: known and new ones."""
        objects, given = self._objects_with(boxes), iter(leaves)
        return [
            next(given)
            if definition is None
            else merging.make_variable(definition, next(given))
            if definition.outer_index is None
            else objects[definition.outer_index]
            for definition in returned.variables
        ]

    def packed(self, given: Sequence[Any], boxes: Sequence[Variable[Any]]) -> Packed:
        """What `packing.pack` gives for these arguments."""
        leaves = self._with_loose(boxes)
        for position, value in zip(self._sources, self._others(given), strict=True):
            leaves[position] = value
        objects = enumerate(self._objects_with(boxes))
        return Packed(self.signature, leaves, IndexMap(objects))

    def _objects_with(self, boxes: Sequence[Variable[Any]]) -> list[Any]:
        """The objects of a call, by their numbers."""
        objects = [x() if isinstance(x, weakref.ref) else x for x in self._objects]
        for number, place in self._loose_objects:
            objects[number] = boxes[place]
        return objects

    def _with_loose(self, boxes: Sequence[Variable[Any]]) -> list[Any]:
        leaves = self._leaves.copy()
        for position, number in self._loose_positions.items():
            leaves[position] = boxes[number]
        return leaves

    def _others(self, given: Sequence[Any]) -> Sequence[Any]:
        """The leaves that are not Variables, in order."""
        rest = iter(given)
        return [
            next(rest)
            if source is GIVEN
            else (source.read() if isinstance(source, Attribute) else source)
            for source in self._sources.values()
        ]

    def _group(self, group: Values) -> _Group:
        """How a group is made of which only the positions are known."""
        members, others = group.values, [*self._sources]
        loose = [p for p in members if p in self._loose_positions]
        attached = [p for p in members if self._leaves[p] is not None]
        inserts = [
            (place, others.index(position))
            for place, position in enumerate(members)
            if position in self._sources
        ]
        boxes = [p for p in members if p not in self._sources]
        found_at = {p: place for place, p in enumerate([*attached, *loose])}
        order = [found_at[p] for p in boxes]
        return _Group(
            [self._leaves[p] for p in attached],
            _picker([self._loose_positions[p] for p in loose]) if loose else None,
            None if order == [*range(len(order))] else _picker(order),
            inserts,
            packing.static_data(self.signature, group.positions),
        )


class _Group(NamedTuple):
    """How a group of leaves is made.

    Attributes:
        attached: Those of its Variables that are in objects.
        pick_loose: Takes those that are not out of all of these, if there are any.
        order: Puts both in order, if they are not.
        inserts: Where other leaves go between them, with their numbers among all these.
        static: The static data of the group.
    """

    attached: list[Variable[Any]]
    pick_loose: Callable[[Sequence[Any]], Sequence[Any]] | None
    order: Callable[[Sequence[Any]], Sequence[Any]] | None
    inserts: list[tuple[int, int]]
    static: Any


class _Outline(NamedTuple):
    """How the groups of leaves are made, if all are in objects or given.

    Attributes:
        types: The types of the leaves, with their places.
        groups: For each group its Variables; where the given leaves go between them,
            with their places; its static data.
    """

    types: list[tuple[int, type]]
    groups: list[tuple[list[Variable[Any]], list[tuple[int, int]], Any]]


# Stands for a leaf of the arguments that is in no object.
GIVEN: Any = object()


def sources(row: Row, tree: Any, packed: Packed) -> dict[int, Any]:
    """Where leaves that are not Variables come from, by position, in order.

    For each `GIVEN`, the attribute of an object, or the leaf itself: what is in a
    container stays as long as the watch holds.
    """
    given, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=nodes.is_node_module)
    given_paths = {paths.from_jax(path) for path, _ in given}
    entries, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=packing.is_entry(row.mode.sharing)
    )
    found: dict[int, Any] = {}
    located = zip(packed.signature.slots, packed.leaves, strict=True)
    for position, (slot, leaf) in enumerate(located):
        if not isinstance(leaf, Variable):
            path = paths.from_jax(entries[slot.entry][0]) + slot.path
            is_given = slot.is_plain and path in given_paths
            place = None if is_given else watches.attribute_at(tree, path)
            found[position] = GIVEN if is_given else place or leaf
    return found


def _places(kinds: Sequence[Any], *wanted: Any) -> list[int]:
    return [place for place, kind in enumerate(kinds) if kind in wanted]


def _picker(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """What takes the members at these places out of a sequence."""
    if len(places) == 1:
        return lambda found: (found[places[0]],)
    return operator.itemgetter(*places) if places else lambda _: ()


def _weakly(obj: Any) -> Any:
    return weakref.ref(obj) if nodes.is_node_module(obj) else obj


class LooseVariables:
    """What the loose Variables of a call must be like for a plan.

    Args:
        boxes: Those of the call that it is made of; their types are compared elsewhere.
        attached: The objects of that call, which have Variables of their own.
        are_written: Whether each call writes all of them.
    """

    def __init__(
        self,
        boxes: Sequence[Variable[Any]],
        attached: Collection[Any],
        are_written: bool,
    ) -> None:
        self._are_written = are_written
        self._metadata = [variables.metadata_of(x).noted() for x in boxes]
        self._is_fixed = all(entries.is_fixed for entries in self._metadata)
        # Those live as long as the plan, so that nothing else gets these numbers.
        self._attached = frozenset(map(id, attached))
        has_refs = any(entries["ref"] for entries in self._metadata)
        self.may_be_planned = not has_refs and self._fit(boxes)

    def read(self, boxes: Sequence[Variable[Any]]) -> list[Any] | None:
        """Their raw values; ``None`` if they are not like the earlier ones."""
        metadata = [*map(variables.metadata_of, boxes)]
        if metadata != self._metadata:
            return None
        # Those of the next call are mostly the same objects, which is seen at once; but
        # not what has changed in them.
        if self._is_fixed:
            self._metadata = metadata
        return variables.read_all(boxes) if self._fit(boxes) else None

    def _fit(self, boxes: Sequence[Variable[Any]]) -> bool:
        """Whether each is there once, and can be written if it must be."""
        numbers = {*map(id, boxes)}
        return (
            len(numbers) == len(boxes)
            and numbers.isdisjoint(self._attached)
            and (not self._are_written or variables.may_replace_all(boxes, ()))
        )


# Lists the members of a container; adds its leaves to a list. Both raise if it is not
# like the earlier one.
_Opener = Callable[[Any], Sequence[Any]]
_Adder = Callable[[Any, list[Any]], None]


class _Unlike(Exception):
    """A tree is not like the one that a reader was made for, or is for no reader."""


def make(
    tree: tuple[Any, ...], leaves: Sequence[Any]
) -> Callable[[Any], list[Any] | None] | None:
    """What reads tuples like this one, which has these leaves in this order.

    It gives the leaves of another one, whatever they are, or ``None`` if its containers
    differ. There is no reader for containers that only JAX can take apart.
    """

    def read(other: Any) -> list[Any] | None:
        found: list[Any] = []
        try:
            add(other, found)
        except _Unlike:
            return None
        return found

    try:
        add = _container(tree, _sequence(tuple, len(tree)))
    except _Unlike:
        return None
    found = read(tree) or []
    is_right = len(found) == len(leaves) and all(map(operator.is_, found, leaves))
    return read if is_right else None


def _adder(x: Any) -> _Adder | None:
    """What reads containers like this one; ``None`` if it is a leaf."""
    kind = type(x)
    if kind is State:
        return _container(x, _state(x))
    if kind is dict:
        return _container(x, _dict(x))
    if kind is list or (isinstance(x, tuple) and nodes.is_node(x)):
        return _container(x, _sequence(kind, len(x)))
    if x is None:
        return _container(x, _nothing)
    if isinstance(nodes.kind_of(x), (Leaf, GraphKind)):
        return None
    raise _Unlike


def _container(x: Any, members_of: _Opener) -> _Adder:
    """What reads containers like this one, whose members these are."""
    adders = [*map(_adder, members_of(x))]

    def extend(x: Any, found: list[Any]) -> None:
        found.extend(members_of(x))

    def add(x: Any, found: list[Any]) -> None:
        for member, add_members in zip(members_of(x), adders, strict=True):
            if add_members is None:
                found.append(member)
            else:
                add_members(member, found)

    return add if any(adders) else extend


# What lists the members of containers like some container.


def _sequence(kind: type, size: int) -> _Opener:
    def members_of(x: Any) -> Sequence[Any]:
        if type(x) is not kind or len(x) != size:
            raise _Unlike
        return x

    return members_of


def _dict(like: dict[Any, Any]) -> _Opener:
    keys, size = paths.sorted_keys(like), len(like)
    pick: Any = operator.itemgetter(*keys) if size > 1 else None

    def members_of(x: Any) -> Sequence[Any]:
        if type(x) is not dict or len(x) != size:
            raise _Unlike
        try:
            return pick(x) if size > 1 else [x[key] for key in keys]
        except KeyError:
            raise _Unlike from None

    return members_of


def _state(like: State) -> _Opener:
    members_of_mapping = _dict(like.raw_mapping)

    def members_of(x: Any) -> Sequence[Any]:
        if type(x) is not State:
            raise _Unlike
        return members_of_mapping(x.raw_mapping)

    return members_of


def _nothing(x: None) -> Sequence[Any]:
    if x is not None:
        raise _Unlike
    return ()
