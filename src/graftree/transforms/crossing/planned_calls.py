"""One planned call: arguments in, raw values to JAX, changed values back.

A plan has the signature, the Variables, the groups of leaves. With one, a call reads
the raw values of the Variables, calls the compiled function with them, and writes the
changed values into their Variables. The set of these was decided when the function was
traced, and comes back as static data of the result. If the result contains objects or
a change of structure, `outside.commit` does the rest.

Variables that are arguments by themselves, in a State, a list, or on their own, may be
new ones at each call: a plan is right for them if they are like those that it was made
for (`BareVariables`). Containers of them are read as their first ones were (`reader`).
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax

from graftree.core import ownership, paths
from graftree.core.graph import flattening, nodes, watches
from graftree.core.graph.flattening import IndexMap
from graftree.core.graph.nodes import GraphKind, Leaf
from graftree.core.graph.watches import Attribute, StructureWatch
from graftree.core.states.states import State
from graftree.core.variables import variables
from graftree.core.variables.variables import Variable
from graftree.transforms.crossing import outside, packing
from graftree.transforms.crossing.inside import Returned
from graftree.transforms.crossing.packing import Packed, Values
from graftree.transforms.crossing.rows import Row

# Stands for the result of a call that has no plan.
NO_PLAN: Any = object()


class Passed(NamedTuple):
    """The arguments of a call, as plans see them.

    Attributes:
        key: The key of a plan.
        tree: ``(args, kwargs)`` without the static ones; ``None`` if the objects in it
            were taken apart, too.
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

    def taken_apart(self) -> Passed | None:
        """The same with the leaves of its objects; ``None`` if one contains itself."""
        # JAX can compare a treedef with anything but None.
        key = [_NO_TREEDEF if x is None else x for x in self.key[:2]]
        leaves: list[Any] = []
        for x in self.leaves:
            found, treedef = [x], _NO_TREEDEF
            if nodes.kind_of(x) is nodes.PYTREE:
                try:
                    found, treedef = nodes.flatten(x)
                except ValueError:
                    return None
            leaves += found
            key.append(treedef)
        return Passed(tuple(key), None, leaves)


_NO_TREEDEF = ()


class Plan:
    """The facts about calls with certain arguments.

    Of Variables that are arguments by themselves it only knows the form.

    Args:
        row: The transform.
        passed: The arguments of the call that the plan is made of.
        packed: The same, packed.
        watch: Checks whether the objects in them are as they were.
        bare: The form of the Variables in them.

    Attributes:
        signature: The static part of the arguments.
        traces: Where traces are noted, if they are.
        watch: See above.
        is_flat: Whether the positional arguments are all of the leaves.
    """

    def __init__(
        self,
        row: Row,
        passed: Passed,
        packed: Packed,
        watch: StructureWatch,
        bare: BareVariables,
    ) -> None:
        self.signature, self.traces = packed.signature, row.traces
        self._row, self.watch = row, watch
        leaves: Sequence[Any] = passed.leaves
        tree: Any = passed.tree
        self._types = [*map(type, leaves)]
        self._roots = [
            (place, weakref.ref(x))
            for place, x in enumerate(leaves)
            if nodes.is_node_module(x)
        ]
        may_read = bool(tree) and not row.statics
        self.is_flat = may_read and packing.are_same(tree[0], leaves)
        self._reader = reader(tree, leaves) if may_read and not self.is_flat else None
        # The sources of the leaves for JAX: Variables of objects, by position, bare
        # ones and values other than Variables, by their numbers.
        kinds = [*map(nodes.kind_of, leaves)]
        places = [n for n, kind in enumerate(kinds) if kind is Leaf.VARIABLE]
        numbers = {id(leaves[place]): n for n, place in enumerate(places)}
        self._bare, self._pick_bare = bare, _picker(places) if places else None
        self._variables = [
            numbers.get(id(x), x) if isinstance(x, Variable) else None
            for x in packed.leaves
        ]
        self._add_others(row, passed, packed, kinds)
        self._objects = [
            numbers[id(x)] if id(x) in numbers else _weakly(x)
            for x in packed.objects.values()
        ]
        attached = [x for x in self._variables if isinstance(x, Variable)]
        self._is_plain = variables.may_replace_all(attached, ())
        groups = outside.groups(row, packed, [*range(len(packed.leaves))])
        self._groups = [self._group(group, len(places)) for group in groups]
        self._may_donate_twice = bool(row.inputs.donated) and any(
            map(outside.is_spread, packed.values())
        )
        self._has_prefixes = row.has_prefixes
        # Usually the same ones in each step.
        self._latest: tuple[Returned | None, Sequence[Any] | None] = (None, None)

    def _add_others(
        self, row: Row, passed: Passed, packed: Packed, kinds: Sequence[Any]
    ) -> None:
        """Notes the sources of leaves that are not Variables.

        They are leaves of the arguments, or attributes of objects, or they stay: the
        contents of a container are the same as long as the watch holds.
        """
        given = (n for n, x in enumerate(kinds) if x is Leaf.ARRAY or x is Leaf.STATIC)
        where = _where(row, passed.tree, packed)
        found: dict[int, Any] = {
            position: _GIVEN if where is None else where(position)
            for position, leaf in enumerate(packed.leaves)
            if not isinstance(leaf, Variable)
        }
        self._attributes = [x for x in found.values() if isinstance(x, Attribute)]
        self._constants = [packed.leaves[p] for p, x in found.items() if x is None]
        attributes = itertools.count(len(kinds))
        constants = itertools.count(len(kinds) + len(self._attributes))
        # Of each the number among the leaves of the arguments, attributes, and others.
        self._others = {
            position: next(
                given if x is _GIVEN else constants if x is None else attributes
            )
            for position, x in found.items()
        }

    def _group(self, group: Values, bare: int) -> _Group:
        """The way to make a group of which only the positions are known."""
        members, known = group.values, self._variables
        attached = [p for p in members if isinstance(known[p], Variable)]
        found_at = {p: place for place, p in enumerate(attached)}
        order = [
            found_at[p] if p in found_at else len(attached) + known[p]
            for p in members
            if p not in self._others
        ]
        is_ordered = order == [*range(len(attached) + bare)]
        return _Group(
            [known[p] for p in attached],
            None if is_ordered else _picker(order),
            [(n, self._others[p]) for n, p in enumerate(members) if p in self._others],
            packing.static_data(self.signature, group.positions),
        )

    def read(self, tree: Any) -> Sequence[Any] | None:
        """The leaves of arguments; ``None`` if they may not fit the plan."""
        return None if self._reader is None else self._reader(tree)

    def call(self, jitted: Callable[..., Any], leaves: Sequence[Any]) -> Any:
        """The result of a call with these leaves; `NO_PLAN` if the plan isn't right.

        All steps are here: as a method, each would cost a twentieth of a small model's
        call, without JAX's part.
        """
        if [*map(type, leaves)] != self._types:
            return NO_PLAN
        for place, weak in self._roots:
            if weak() is not leaves[place]:
                return NO_PLAN
        boxes: Any = ()
        values: Any = ()
        if self._pick_bare is not None:
            boxes = self._pick_bare(leaves)
            values = self._bare.read(boxes)
            if values is None:
                return NO_PLAN
        watch = self.watch
        if ownership.clock.now != watch.checked or watch.has_contents:
            if not watch.holds():
                return NO_PLAN
        if self._attributes or self._constants:
            arrays = watches.read_all(self._attributes)
            leaves = [*leaves, *arrays, *self._constants]
        groups = []
        for attached, order, inserts, static in self._groups:
            found = variables.read_all(attached)
            if boxes:
                found += values
            if order is not None:
                found = [*order(found)]
            for place, number in inserts:
                found.insert(place, leaves[number])
            groups.append(Values((found, static)))
        if self._may_donate_twice and outside.donates_twice(self._row, groups):
            return NO_PLAN
        result = jitted(*groups)
        returned = result[0]
        latest, targets = self._latest
        if latest is not returned:
            targets = self._targets(returned)
            self._latest = returned, targets
        if targets is None or boxes or self._has_prefixes or returned.variables:
            return self._commit(result, targets, leaves, boxes)
        if targets:
            variables.replace_all(targets, result[1])
        return returned.unflatten(result[3])

    def _targets(self, returned: Returned) -> Sequence[Any] | None:
        """The targets of a result's changes: Variables, or numbers of bare ones.

        ``None`` if the result does more than give these values and return leaves.
        """
        if not (self._is_plain and returned.is_plain):
            return None
        return [self._variables[position] for position in returned.changed]

    def _commit(
        self,
        result: Any,
        targets: Sequence[Any] | None,
        leaves: Sequence[Any],
        boxes: Sequence[Variable[Any]],
    ) -> Any:
        """`outside.commit`; less to do if only Variables are written and returned."""
        returned, changed, _, out = result
        if targets is not None:
            targets = [boxes[x] if type(x) is int else x for x in targets]
            # Those of objects were checked when the plan was made.
            if boxes and not variables.may_replace_all(targets, ()):
                targets = None
        if targets is None:
            return outside.commit(self._packed(leaves, boxes), result)
        if self._has_prefixes:
            _, changed, _, out = outside.in_order(result)
        variables.replace_all(targets, changed)
        if returned.variables:
            objects, given = self._objects_with(boxes), iter(out)
            out = [
                next(given)
                if definition is None
                else flattening.make_variable(definition, next(given))
                if definition.outer_index is None
                else objects[definition.outer_index]
                for definition in returned.variables
            ]
        return returned.unflatten(out)

    def _packed(self, leaves: Sequence[Any], boxes: Sequence[Variable[Any]]) -> Packed:
        """The result of `packing.pack` for these arguments."""
        found: list[Any] = [boxes[x] if type(x) is int else x for x in self._variables]
        for position, number in self._others.items():
            found[position] = leaves[number]
        objects = enumerate(self._objects_with(boxes))
        return Packed(self.signature, found, IndexMap(objects))

    def _objects_with(self, boxes: Sequence[Variable[Any]]) -> list[Any]:
        """The objects of a call, by their numbers."""
        return [
            boxes[x] if type(x) is int else x() if isinstance(x, weakref.ref) else x
            for x in self._objects
        ]


class _Group(NamedTuple):
    """The way to make a group of leaves.

    Attributes:
        attached: Those of its Variables that are in objects.
        order: Picks its Variables out of these and all bare ones; ``None`` if these are
            all of them, in order.
        inserts: Where other leaves go between them, with their numbers.
        static: The static data of the group.
    """

    attached: list[Variable[Any]]
    order: Callable[[Sequence[Any]], Sequence[Any]] | None
    inserts: list[tuple[int, int]]
    static: Any


# Stands for where a leaf of the arguments is that is in no object.
_GIVEN: Any = object()


def _where(row: Row, tree: Any, packed: Packed) -> Callable[[int], Any] | None:
    """The attribute that has the leaf at a position, or `_GIVEN`.

    ``None`` if all are, since the objects were taken apart with the arguments.
    """
    if tree is None:
        return None
    given, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=nodes.is_node_module)
    given_paths = {paths.from_jax(path) for path, _ in given}
    entries, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=packing.is_entry(row.mode.sharing)
    )
    slots = packed.signature.slots

    def where(position: int) -> Any:
        slot = slots[position]
        path = paths.from_jax(entries[slot.entry][0]) + slot.path
        is_given = slot.is_plain and path in given_paths
        return _GIVEN if is_given else watches.attribute_at(tree, path)

    return where


def _picker(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that takes the members at these places out of a sequence."""
    if len(places) == 1:
        return lambda found: (found[places[0]],)
    return operator.itemgetter(*places) if places else lambda _: ()


def _weakly(obj: Any) -> Any:
    return weakref.ref(obj) if nodes.is_node_module(obj) else obj


class BareVariables:
    """The form that Variables as arguments must have for a plan.

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
        # Those of the next call are usually the same objects, which is seen at once;
        # but changes in them are not.
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


def reader(
    tree: tuple[Any, ...], leaves: Sequence[Any]
) -> Callable[[Any], list[Any] | None] | None:
    """A reader for tuples like this one, which has these leaves in this order.

    It gives the leaves of another one, of any kind, or ``None`` if its containers
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
    return read if packing.are_same(found, leaves) else None


def _adder(x: Any) -> _Adder | None:
    """A reader for containers like this one; ``None`` if it is a leaf."""
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
    """A reader for containers like this one, with a function that lists members."""
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


# Functions that list the members of containers like some container.


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
