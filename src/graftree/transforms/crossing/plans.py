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

Plans refer to the objects of the caller weakly, and go with them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from graftree import _jax
from graftree.core import paths
from graftree.core.graph import flattening, freshness, nodes
from graftree.core.graph.flattening import IndexMap, RefMap
from graftree.core.graph.freshness import Attribute, Survey
from graftree.core.graph.nodes import Leaf
from graftree.core.objects import running
from graftree.core.objects.bookkeeping import state_of
from graftree.core.variables import variables
from graftree.core.variables.variables import Variable
from graftree.transforms.crossing import arguments, outside, packing
from graftree.transforms.crossing.inside import Returned
from graftree.transforms.crossing.packing import Packed, Values
from graftree.transforms.crossing.rows import Row

# How many combinations of objects a function remembers. Those that are gone are
# forgotten at once; so this is about how many models take turns.
LIMIT = 64


class _Arguments(NamedTuple):
    """Arguments as a plan sees them.

    Attributes:
        key: What a plan is found by.
        tree: ``(args, kwargs)``, without the static ones.
        roots: The objects in it.
        given: Its other leaves.
    """

    key: tuple[Any, ...]
    tree: Any
    roots: list[Any]
    given: list[Any]


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

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PlannedCall | None:
        """The outside of a call, if there is a plan for it."""
        # Objects inside a trace are new ones each time. An observer wants to know what
        # these here become in the trace.
        if _jax.current_trace() is not _jax.no_trace or running.stack.observers:
            return None
        # Most calls are like the one before, with objects and arrays as arguments.
        latest = self._latest
        if latest is not None and not kwargs:
            given = latest.match(self._bound + args)
            if given is not None:
                return PlannedCall(latest, given)
        known = self._read(args, kwargs)
        if known is None:
            return None
        plan = self._known.get(known.key)
        if plan is None or not plan.holds(known.roots):
            return None
        self._latest = plan
        return PlannedCall(plan, known.given)

    def learn(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], packed: Packed, made: int
    ) -> None:
        """Makes a plan of what a call found out, if its objects come a second time."""
        known = None if _jax.is_tracing() else self._read(args, kwargs)
        if known is None:
            return
        states = [*map(state_of, known.roots)]
        if all(state in self._seen for state in states):
            self._remember(known, packed, made)
        self._seen.update(states)

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments | None:
        """What a plan is found by; ``None`` if there can be none."""
        row, tree, statics = self._row, ((*self._bound, *args), kwargs), ()
        if row.statics:
            *tree, statics = arguments.take(row.statics, *tree, row.name)
        flat, treedef = jax.tree.flatten(tree, is_leaf=nodes.is_graph_node)
        roots, given = [], []
        tokens: list[Any] = [treedef, statics]
        for x in flat:
            kind = nodes.kind_of(x)
            if kind is nodes.PYTREE:
                roots.append(x)
                # An object that lives as long as the root does, with a hash of its own.
                tokens.append(state_of(x))
            elif kind is Leaf.ARRAY or kind is Leaf.STATIC:
                given.append(x)
                tokens.append(None)
            else:  # a Variable or ref on its own, or a type without stamps
                return None
        return _Arguments(tuple(tokens), tree, roots, given)

    def _remember(self, known: _Arguments, packed: Packed, made: int) -> None:
        key, tree, roots, _ = known
        if self._row.mode.sharing:
            objects: Any = packed.objects.values()
        else:
            objects = RefMap()
            for root in roots:
                flattening.flatten_graph(root, objects)
        survey = Survey(objects, made)
        if not survey.is_complete or survey.reaches(roots):
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
            plan = Plan(self._row, tree, packed, weak_roots, survey)
        except (LookupError, StopIteration):
            return  # Another thread has changed an object since it was packed.
        self._known[key] = self._latest = plan

    def _forget(self, key: Any) -> None:
        plan = self._known.pop(key, None)
        if plan is self._latest:
            self._latest = None


class Plan:
    """What is known about a call with certain objects."""

    def __init__(
        self,
        row: Row,
        tree: Any,
        packed: Packed,
        roots: list[weakref.ref[Any]],
        survey: Survey,
    ) -> None:
        self.signature = packed.signature
        self._row = row
        self._roots = roots
        self._survey = survey
        self._objects = [_weakly(obj) for obj in packed.objects.values()]
        self._sources = _sources(row, tree, packed)
        self._reads_attributes = any(s is not _GIVEN for s in self._sources.values())
        # Variables, and None for all other leaves.
        self._leaves = [x if isinstance(x, Variable) else None for x in packed.leaves]
        boxes = [x for x in self._leaves if x is not None]
        self.is_plain = variables.may_replace_all(boxes, ())
        self._groups = None
        if not row.inputs.reads_leaves:
            self._groups = _groups(row, packed, self._leaves, [*self._sources])
        self._targets: tuple[Returned | None, Sequence[Any]] = (None, ())
        self._layout = _layout(tree, roots) if not row.statics else None

    def match(self, args: tuple[Any, ...]) -> list[Any] | None:
        """The leaves that are in no object; ``None`` if the plan may not be right."""
        layout = self._layout
        if layout is None or len(layout) != len(args):
            return None
        given = []
        for x, (kind, weak) in zip(args, layout, strict=True):
            if type(x) is not kind:
                return None
            if weak is None:
                given.append(x)
            elif weak() is not x:
                return None
        return given if self._survey.holds() else None

    def holds(self, roots: Sequence[Any]) -> bool:
        """Whether it is right for these objects as they are now."""
        # In the key they stand as what is theirs alone, if nobody copied `vars(root)`.
        for weak, root in zip(self._roots, roots, strict=True):
            if weak() is not root:
                return False
        return self._survey.holds()

    def groups(self, given: Sequence[Any]) -> Sequence[Values]:
        """What JAX gets."""
        if self._groups is None:
            packed = self.packed(given)
            return outside.groups(self._row, packed, packed.values())
        others = self._others(given) if self._reads_attributes else given
        groups = []
        for boxes, inserts, positions in self._groups:
            values = variables.read_all(boxes)
            for place, number in inserts:
                values.insert(place, others[number])
            groups.append(Values(values, self.signature, positions))
        return groups

    def targets(self, returned: Returned) -> Sequence[Any]:
        """The Variables that a result with this static part changes."""
        # The same ones in each step, mostly.
        latest = self._targets
        if latest[0] is not returned:
            picked = [self._leaves[position] for position in returned.changed]
            self._targets = latest = (returned, picked)
        return latest[1]

    def packed(self, given: Sequence[Any]) -> Packed:
        """What `packing.pack` gives for these arguments."""
        leaves = self._leaves.copy()
        for position, value in zip(self._sources, self._others(given), strict=True):
            leaves[position] = value
        objects = [x() if isinstance(x, weakref.ref) else x for x in self._objects]
        return Packed(self.signature, leaves, IndexMap(enumerate(objects)))

    def _others(self, given: Sequence[Any]) -> Sequence[Any]:
        """The leaves that are not Variables, in order."""
        rest = iter(given)
        return [
            next(rest)
            if source is _GIVEN
            else (source.read() if isinstance(source, Attribute) else source)
            for source in self._sources.values()
        ]


class PlannedCall:
    """The outside of a call that follows a plan; see `outside.Call`.

    Attributes:
        groups: What JAX gets.
    """

    __slots__ = ("_given", "_plan", "groups")

    def __init__(self, plan: Plan, given: Sequence[Any]) -> None:
        self._plan = plan
        self._given = given
        self.groups = plan.groups(given)

    def commit(self, result: Any) -> Any:
        """Writes a result of `Inside.leave` to the caller's objects."""
        plan, returned = self._plan, result[0]
        if not (plan.is_plain and returned.is_plain):
            return outside.commit(plan.packed(self._given), result)
        _, changed, _, out = result
        positions, _, numbers = returned.groups
        if positions:
            values = outside.joined(changed, positions)
            variables.replace_all(plan.targets(returned), values)
        return returned.unflatten(outside.joined(out, numbers))


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


def _layout(
    tree: Any, roots: Sequence[weakref.ref[Any]]
) -> list[tuple[type, weakref.ref[Any] | None]] | None:
    """The type of each argument, a reference to each object; ``None`` if nested."""
    args, kwargs = tree
    if kwargs or not all(map(_is_leaf, args)):
        return None
    rest = iter(roots)
    return [(type(x), next(rest) if nodes.is_node_module(x) else None) for x in args]


def _is_leaf(x: Any) -> bool:
    return nodes.kind_of(x) in (nodes.PYTREE, Leaf.ARRAY, Leaf.STATIC)


def _groups(
    row: Row, packed: Packed, leaves: Sequence[Any], others: Sequence[int]
) -> list[tuple[list[Variable[Any]], list[tuple[int, int]], tuple[int, ...] | None]]:
    """How the groups of leaves are made.

    For each group its Variables; where between them other leaves are put in, with their
    number among all of these; and the positions of its leaves.
    """
    found = []
    for group in outside.groups(row, packed, [*range(len(leaves))]):
        members = group.values
        inserts = [
            (place, others.index(position))
            for place, position in enumerate(members)
            if leaves[position] is None
        ]
        boxes = [leaves[i] for i in members if leaves[i] is not None]
        found.append((boxes, inserts, group.positions))
    return found


def _weakly(obj: Any) -> Any:
    return weakref.ref(obj) if nodes.kind_of(obj) is nodes.PYTREE else obj
