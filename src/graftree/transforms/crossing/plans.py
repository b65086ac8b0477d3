"""Calls that cost what JAX costs: the memo of pack.

Between two steps of a training loop only the values of Variables change. So what
`outside.Call` found out about its arguments is kept as a `Plan` for the next call with
the same objects: the signature, the Variables, the groups of leaves. With one, a call

    1. finds it by the objects in the arguments, and asks its `Survey` if it still holds
    2. reads the raw values of the Variables and calls what JAX compiled with them
    3. writes the values that the function changed into their Variables

Which Variables those are was decided when the function was traced, and comes back as
static data of the result. Without a plan, or if the result contains objects or a change
of structure, `outside.commit` does the same.

Plans refer to the objects of the caller weakly, and go with them. Variables that are
arguments by themselves may be new ones at each call (see ``loose_variables.py``).
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from graftree import _jax
from graftree.core import paths
from graftree.core.graph import flattening, freshness, merging, nodes
from graftree.core.graph.flattening import IndexMap, RefMap
from graftree.core.graph.freshness import Attribute, Survey
from graftree.core.graph.nodes import Leaf
from graftree.core.objects import running
from graftree.core.objects.bookkeeping import state_of
from graftree.core.variables import variables
from graftree.core.variables.variables import Variable
from graftree.transforms.crossing import arguments, outside, packing, readers
from graftree.transforms.crossing.inside import Returned
from graftree.transforms.crossing.loose_variables import LooseVariables
from graftree.transforms.crossing.packing import Packed, Values
from graftree.transforms.crossing.rows import Row

# How many combinations of objects a function remembers. Those that are gone are
# forgotten at once; so this is about how many models take turns.
LIMIT = 64


# Stands for the result of a call that has no plan.
NO_PLAN: Any = object()


class _Arguments(NamedTuple):
    """Arguments as a plan sees them.

    Attributes:
        key: What a plan is found by.
        tree: ``(args, kwargs)``, without the static ones.
        leaves: The leaves of the tree: objects, Variables, arrays and other values.
    """

    key: tuple[Any, ...]
    tree: Any
    leaves: Sequence[Any]

    def of_kind(self, *kinds: Any) -> list[Any]:
        """Those leaves that are of one of these kinds."""
        return [x for x in self.leaves if nodes.kind_of(x) in kinds]


class Plans:
    """The plans of one compiled function."""

    def __init__(self, row: Row, bound: tuple[Any, ...] = ()) -> None:
        self._row = row
        self._bound = bound
        # Reading, adding and removing an entry are atomic, so threads need no lock.
        self._known: dict[Any, Plan] = {}
        self._latest: Plan | None = None
        # What stands for the objects of earlier calls. A plan costs more than a call
        # without one, and is made when objects come a second time.
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def call(
        self, jitted: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What a call gives if there is a plan for it, else `NO_PLAN`."""
        # Objects inside a trace are new ones each time. An observer wants to know what
        # these here become in the trace.
        if _jax.current_trace() is not _jax.no_trace or running.stack.observers:
            return NO_PLAN
        # Most calls are like the one before.
        latest = self._latest
        if latest is not None:
            leaves = latest.read(self._bound + args if self._bound else args, kwargs)
            if leaves is not None:
                out = latest.call(jitted, leaves)
                if out is not NO_PLAN:
                    return out
        known = self._read(args, kwargs)
        plan = None if known is None else self._known.get(known.key)
        if known is None or plan is None:
            return NO_PLAN
        out = plan.call(jitted, known.leaves)
        if out is not NO_PLAN:
            self._latest = plan
        return out

    def learn(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], packed: Packed, made: int
    ) -> None:
        """Makes a plan of what a call found out, if its objects come a second time."""
        known = None if _jax.is_tracing() else self._read(args, kwargs)
        if known is None:
            return
        states = [state_of(root) for root in known.of_kind(nodes.PYTREE)]
        if all(state in self._seen for state in states):
            self._remember(known, packed, made)
        self._seen.update(states)

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments | None:
        """What a plan is found by; ``None`` if there can be none."""
        row, tree, statics = self._row, ((*self._bound, *args), kwargs), ()
        if row.statics:
            *tree, statics = arguments.take(row.statics, *tree, row.name)
        leaves, treedef = jax.tree.flatten(tree, is_leaf=nodes.is_graph_node)
        tokens: list[Any] = [treedef, statics]
        for x in leaves:
            kind = nodes.kind_of(x)
            if kind is nodes.PYTREE:
                # An object that lives as long as the root does, with a hash of its own.
                tokens.append(state_of(x))
            elif kind is Leaf.VARIABLE:
                tokens.append(type(x))
            elif kind is Leaf.ARRAY or kind is Leaf.STATIC:
                tokens.append(None)
            else:  # a ref on its own, or a type without stamps
                return None
        return _Arguments(tuple(tokens), tuple(tree), leaves)

    def _remember(self, known: _Arguments, packed: Packed, made: int) -> None:
        row, key = self._row, known.key
        roots, boxes = known.of_kind(nodes.PYTREE), known.of_kind(Leaf.VARIABLE)
        objects: Any = packed.objects.values()
        if boxes or not row.mode.sharing:
            objects = RefMap()
            for root in roots:
                flattening.flatten_graph(root, objects)
        survey = Survey(objects, made)
        if not survey.is_complete or survey.reaches(roots):
            return
        loose = LooseVariables(boxes, objects, bool(row.inputs.donated))
        if not loose.may_be_planned:
            return
        # The function may be gone before its objects are.
        weak = weakref.WeakMethod(self._forget)

        def forget(_: Any) -> None:
            method = weak()
            if method is not None:
                method(key)

        for oldest in [*self._known][: 1 - LIMIT]:
            self._forget(oldest)
        weak_roots = [weakref.ref(root, forget) for root in roots]
        try:
            plan = Plan(row, known, packed, weak_roots, survey, loose)
        except (LookupError, StopIteration):
            return  # Another thread has changed an object since it was packed.
        self._known[key] = self._latest = plan

    def _forget(self, key: Any) -> None:
        plan = self._known.pop(key, None)
        if plan is self._latest:
            self._latest = None


class Plan:
    """What is known about a call with certain objects.

    Of Variables that are arguments by themselves it only knows what they are like.
    """

    def __init__(
        self,
        row: Row,
        known: _Arguments,
        packed: Packed,
        roots: list[weakref.ref[Any]],
        survey: Survey,
        loose: LooseVariables,
    ) -> None:
        self.signature = packed.signature
        self.traces = row.traces
        self._row = row
        self._survey = survey
        kinds = [*map(nodes.kind_of, known.leaves)]
        self._roots = [*zip(_places(kinds, nodes.PYTREE), roots, strict=True)]
        self._given = _places(kinds, Leaf.ARRAY, Leaf.STATIC)
        boxes = _places(kinds, Leaf.VARIABLE)
        self._loose = loose if boxes else None
        self._pick_loose = _picker(boxes)
        # How the leaves of a call are found: they may be all there is.
        self._types = [*map(type, known.leaves)]
        self._is_flat = not row.statics and _are_same(known.tree[0], known.leaves)
        self._reader = None
        if not (row.statics or self._is_flat):
            self._reader = readers.make(known.tree, known.leaves)
        # Where the leaves for JAX come from.
        places = {id(known.leaves[place]): n for n, place in enumerate(boxes)}
        self._loose_positions = {
            position: places[id(leaf)]
            for position, leaf in enumerate(packed.leaves)
            if id(leaf) in places
        }
        self._sources = _sources(row, known.tree, packed)
        self._reads_attributes = any(s is not _GIVEN for s in self._sources.values())
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

    def read(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Sequence[Any] | None:
        """The leaves of the arguments; ``None`` if they may not be what is known."""
        leaves: Sequence[Any] | None = args
        if kwargs or not self._is_flat:
            leaves = None if self._reader is None else self._reader((args, kwargs))
        if leaves is None or [*map(type, leaves)] != self._types:
            return None
        return leaves

    def call(self, jitted: Callable[..., Any], leaves: Sequence[Any]) -> Any:
        """What a call with leaves of these types gives; `NO_PLAN` if it isn't right."""
        # In the key they stand as what is theirs alone, if nobody copied `vars(root)`.
        for place, weak in self._roots:
            if weak() is not leaves[place]:
                return NO_PLAN
        boxes = values = ()
        if self._loose is not None:
            boxes = self._pick_loose(leaves)
            values = self._loose.read(boxes)
        if values is None or not self._survey.holds():
            return NO_PLAN
        given = [leaves[place] for place in self._given]
        groups = self.groups(given, boxes, values)
        result = jitted(*groups)
        if self.is_plain and result[0].is_plain:
            return self._commit(result, given, boxes)
        return outside.commit(self.packed(given, boxes), result)

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
            groups.append(packing.with_static(values, group.static))
        return groups

    def _commit(
        self, result: Any, given: Sequence[Any], boxes: Sequence[Variable[Any]]
    ) -> Any:
        """`outside.commit` where nothing but Variables are written and returned."""
        returned, changed, _, out = result
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
            if source is _GIVEN
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


# Stands for a leaf of the arguments that is in no object.
_GIVEN: Any = object()


def _sources(row: Row, tree: Any, packed: Packed) -> dict[int, Any]:
    """Where leaves that are not Variables come from, by position, in order.

    For each `_GIVEN`, the attribute of an object, or the leaf itself: what is in a
    container stays as long as the survey holds.
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
            place = None if is_given else freshness.attribute_at(tree, path)
            found[position] = _GIVEN if is_given else place or leaf
    return found


def _places(kinds: Sequence[Any], *wanted: Any) -> list[int]:
    return [place for place, kind in enumerate(kinds) if kind in wanted]


def _picker(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """What takes the members at these places out of a sequence."""
    if len(places) == 1:
        return lambda found: (found[places[0]],)
    return operator.itemgetter(*places) if places else lambda _: ()


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _weakly(obj: Any) -> Any:
    return weakref.ref(obj) if nodes.kind_of(obj) is nodes.PYTREE else obj
