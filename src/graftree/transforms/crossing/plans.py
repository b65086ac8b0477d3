"""Calls that cost what JAX costs: the memo of pack.

Between two steps of a training loop only the values of Variables change. So what
`outside.Call` found out about its arguments is kept as a `Plan` for the next call with
the same objects, which is found by the objects in the arguments, and asks a
`StructureWatch` if it still holds. What a planned call does is in ``planned_calls.py``.

For the same objects there may be several plans, which differ in static values: of a
model in training and in evaluation. A watch holds again when these are what they were.
Plans refer to the objects of the caller weakly, and go with them.

In tree mode an object is to JAX what it holds: its Variables and arrays are leaves, the
rest is in the treedef. So a call with objects that never came before is known by the
treedefs of its arguments and by what the Variables are like (`TreePlans`).

Transforms other than `jit` trace at each call: the function may read what it likes. But
what became of its arguments outside is remembered as well (`RepeatedCalls`).
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from graftree import _jax
from graftree.core import stamps
from graftree.core.graph import nodes, tree_checks, watches
from graftree.core.graph.nodes import Leaf
from graftree.core.graph.watches import StructureWatch
from graftree.core.objects import classes, running
from graftree.core.objects.bookkeeping import state_of
from graftree.core.pickling import Rebuilt
from graftree.core.variables import partitioning, variables
from graftree.transforms.crossing import decorators, outside, planned_calls
from graftree.transforms.crossing.outside import Call
from graftree.transforms.crossing.packing import Packed, Values
from graftree.transforms.crossing.planned_calls import (
    GIVEN,
    NO_PLAN,
    Arguments,
    LooseVariables,
    Plan,
)
from graftree.transforms.crossing.rows import Keywords, Row

# How many combinations of objects a function remembers. Those that are gone are
# forgotten at once; so this is about how many models take turns. For each there are as
# many plans as `watches.with_newest` keeps.
LIMIT = 64


class Plans:
    """The plans of one compiled function."""

    def __init__(self, row: Row, bound: tuple[Any, ...] = ()) -> None:
        self._row = row
        self._bound = bound
        # Reading, adding and removing an entry are atomic, so threads need no lock.
        self._known: dict[Any, tuple[PlanOfObjects, ...]] = {}
        self._latest: PlanOfObjects | None = None
        # What stands for the objects of earlier calls. A plan costs more than a call
        # without one, and is made when objects come a second time.
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self._trees = None if row.mode.sharing else TreePlans(row)

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
            given = self._bound + args if self._bound else args
            out = latest.call_with(jitted, given, kwargs)
            if out is not NO_PLAN:
                return out
        known = self._read(args, kwargs)
        if known is None:
            return NO_PLAN
        plans = self._known.get(known.key)
        if plans is None:
            return self._call_with_new(jitted, known)
        for plan in plans:
            out = plan.call(jitted, known.leaves)
            if out is not NO_PLAN:
                self._latest = plan
                return out
        return NO_PLAN

    def _call_with_new(self, jitted: Callable[..., Any], known: Arguments) -> Any:
        """`call` for objects that come for the first time."""
        trees = self._trees
        if trees is None or not trees.known:
            return NO_PLAN
        states, seen = _states(known), self._seen
        if all(state in seen for state in states):
            return NO_PLAN  # a plan of their own will cost less
        out = trees.call(jitted, known)
        if out is not NO_PLAN:
            seen.update(states)
        return out

    def learn(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], packed: Packed, made: int
    ) -> None:
        """Makes a plan of what a call found out, if its objects come a second time."""
        known = None if _jax.is_tracing() else self._read(args, kwargs)
        if known is None:
            return
        states = _states(known)
        if all(state in self._seen for state in states):
            self._remember(known, packed, made)
        elif self._trees is not None:
            self._trees.learn(known, packed)
        self._seen.update(states)

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """What a plan is found by; ``None`` if there can be none."""
        row, tree, statics = self._row, ((*self._bound, *args), kwargs), ()
        if row.statics:
            *tree, statics = decorators.take(row.statics, *tree, row.name)
        leaves: Any = tree[0]
        treedef: Any = None
        tokens = None if tree[1] else _tokens(leaves)
        if tokens is None:  # there are containers
            leaves, treedef = jax.tree.flatten(tree, is_leaf=nodes.is_graph_node)
            tokens = _tokens(leaves)
            if tokens is None:  # a ref on its own, or a type without stamps
                return None
        return Arguments((treedef, statics, *tokens), tuple(tree), leaves)

    def _remember(self, known: Arguments, packed: Packed, made: int) -> None:
        row, key = self._row, known.key
        roots, boxes = known.objects(), known.variables()
        if boxes or not row.mode.sharing or packed.skeleton is None:
            watch = StructureWatch.over(roots, made)
        else:
            members, objects = packed.members, packed.objects
            watch = StructureWatch(packed.skeleton, members, objects, made)
        if not watch.is_complete or watch.reaches(roots):
            return
        loose = LooseVariables(boxes, watch.variables, bool(row.inputs.donated))
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
            plan = PlanOfObjects(row, known, packed, weak_roots, watch, loose)
        except (LookupError, StopIteration):
            return  # Another thread has changed an object since it was packed.
        self._known[key] = watches.with_newest(plan, self._known.get(key, ()))
        self._latest = plan

    def _forget(self, key: Any) -> None:
        if self._latest in self._known.pop(key, ()):
            self._latest = None


def _states(known: Arguments) -> list[Any]:
    """What of the arguments tells whether they came before."""
    objects = known.objects()
    return [state_of(x) for x in objects if nodes.kind_of(x) is nodes.PYTREE]


def _tokens(leaves: Sequence[Any]) -> list[Any] | None:
    """What stands for these leaves in a key; ``None`` if there are others in it."""
    tokens: list[Any] = []
    for x in leaves:
        kind = nodes.kind_of(x)
        if kind is nodes.PYTREE:
            # An object that lives as long as the root does, with a hash of its own.
            tokens.append(state_of(x))
        elif isinstance(kind, nodes.GraphKind):
            tokens.append(id(x))  # it may have no hash; a plan knows its roots
        elif kind is Leaf.ARRAY or kind is Leaf.STATIC:
            tokens.append(None)
        elif kind is Leaf.VARIABLE:
            tokens.append(type(x))
        else:
            return None
    return tokens


class PlanOfObjects(Plan):
    """What is known about a call with certain objects, found by what they are in.

    Attributes:
        watch: Tells whether the objects are as they were.
    """

    def __init__(
        self,
        row: Row,
        known: Arguments,
        packed: Packed,
        roots: list[weakref.ref[Any]],
        watch: StructureWatch,
        loose: LooseVariables,
    ) -> None:
        sources = planned_calls.sources(row, known.tree, packed)
        super().__init__(row, known.leaves, packed, watch, loose, sources, roots)
        self.watch = watch
        # The leaves of a call may be all there is.
        self._is_flat = not row.statics and _are_same(known.tree[0], known.leaves)
        self._reader = None
        if not (row.statics or self._is_flat):
            self._reader = planned_calls.make(known.tree, known.leaves)

    def call_with(
        self, jitted: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What a call with these arguments gives; `NO_PLAN` if it isn't right.

        Where there is no more to it than arrays, and objects of which only Variables
        are written, this is `call` again, but without methods for the single steps.
        Each of them would be a twentieth of what such a call costs beside JAX.
        """
        outline = self.outline
        if outline is None or kwargs or not self._is_flat:
            leaves = self._read(args, kwargs)
            return NO_PLAN if leaves is None else self.call(jitted, leaves)
        types, parts = outline
        if len(args) != len(types):
            return NO_PLAN
        for place, kind in types:
            if type(args[place]) is not kind:
                return NO_PLAN
        for place, weak in self.roots:
            if weak() is not args[place]:
                return NO_PLAN
        watch = self.watch
        if stamps.clock.now != watch.checked or watch.has_contents:
            if not watch.holds():
                return NO_PLAN
        groups = []
        for attached, inserts, static in parts:
            values = variables.read_all(attached)
            for place, number in inserts:
                values.insert(place, args[number])
            groups.append(Values((values, static)))
        result = jitted(*groups)
        returned, changed, _, out = result
        if not returned.is_plain or returned.variables:
            return self.commit(result, [args[place] for place in self.given], ())
        if returned.changed:
            variables.replace_all(self.targets(returned, ()), changed)
        return returned.unflatten(out)

    def _read(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Sequence[Any] | None:
        """The leaves of the arguments; ``None`` if they may not be what is known."""
        leaves: Sequence[Any] | None = args
        if kwargs or not self._is_flat:
            leaves = None if self._reader is None else self._reader((args, kwargs))
        if leaves is None or [*map(type, leaves)] != self.types:
            return None
        return leaves


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


# How many structures a function remembers.
LIMIT = 64

_BOX = Leaf.VARIABLE
_LEAVES = (_BOX, Leaf.ARRAY, Leaf.STATIC)
# A treedef can be compared with anything but None.
_NO_TREEDEF = ()


class TreePlans:
    """The plans of one compiled function for objects by their structure.

    Args:
        row: Its transform.

    Attributes:
        known: The plans.
    """

    def __init__(self, row: Row) -> None:
        self._row = row
        # Reading, adding and removing an entry are atomic, so threads need no lock.
        self.known: dict[Any, Plan] = {}
        self._latest: tuple[Any, Plan | None] = (None, None)

    def call(self, jitted: Callable[..., Any], arguments: Arguments) -> Any:
        """What a call gives if there is a plan for it, else `NO_PLAN`."""
        flat = _flatten(arguments)
        if flat is None:
            return NO_PLAN
        key, leaves = flat
        latest, plan = self._latest
        # Equality of the treedefs costs less than their hash.
        if plan is None or key != latest:
            plan = self._find(key)
            if plan is None:
                return NO_PLAN
            self._latest = key, plan
        if [*map(type, leaves)] != plan.types:
            return NO_PLAN
        return plan.call(jitted, leaves)

    def learn(self, arguments: Arguments, packed: Packed) -> None:
        """Makes a plan of what a call found out."""
        flat = _flatten(arguments)
        if flat is None:
            return
        key, leaves = flat
        boxes = [x for x in leaves if nodes.kind_of(x) is _BOX]
        loose = LooseVariables(boxes, (), bool(self._row.inputs.donated))
        if not (loose.may_be_planned and _are_leaves_of(packed, leaves)):
            return
        given = [
            n for n, x in enumerate(leaves) if nodes.kind_of(x) is not Leaf.VARIABLE
        ]
        sources = dict.fromkeys(given, GIVEN)
        plan = Plan(self._row, leaves, packed, _Classes(), loose, sources)
        for oldest in [*self.known][: 1 - LIMIT]:
            self.known.pop(oldest, None)
        try:
            self.known[key] = plan
        except TypeError:
            return  # a static value without a hash
        self._latest = key, plan

    def _find(self, key: Any) -> Plan | None:
        try:
            return self.known.get(key)
        except TypeError:
            return None  # a static value without a hash


def _flatten(arguments: Arguments) -> tuple[Any, list[Any]] | None:
    """The treedefs of a call and its leaves; ``None`` if an object contains itself."""
    key, leaves = [_NO_TREEDEF if x is None else x for x in arguments.key[:2]], []
    for x in arguments.leaves:
        if nodes.kind_of(x) is nodes.PYTREE:
            try:
                found, treedef = tree_checks.flatten(x)
            except ValueError:
                return None
            leaves += found
            key.append(treedef)
        else:
            leaves.append(x)
            key.append(_NO_TREEDEF)
    return tuple(key), leaves


def _are_leaves_of(packed: Packed, leaves: list[Any]) -> bool:
    """Whether these are what the call took its arguments apart into, and can plan."""
    return (
        len(leaves) == len(packed.leaves)
        and all(x is y for x, y in zip(leaves, packed.leaves, strict=True))
        and all(nodes.kind_of(x) in _LEAVES for x in leaves)
    )


class _Classes:
    """Whether the classes of objects are as they were."""

    def __init__(self) -> None:
        self._stamp = classes.changes.stamp

    def holds(self) -> bool:
        """Whether none has changed in a way that objects depend on."""
        return classes.changes.stamp == self._stamp


class RepeatedCalls(Rebuilt):
    """The calls of one function in one transform.

    Args:
        f: The function.
        row: Its transform.
    """

    def __init__(self, f: Callable[..., Any], row: Row) -> None:
        self._f, self._row = f, row
        self._plans = Plans(row)
        self._is_called = False
        # A filter that reads values may give others each time; and what a plan writes
        # has no axis to be named.
        names_axis = partitioning.PARTITION_NAME in row.axis_metadata
        self._may_plan = not (row.inputs.reads_leaves or names_axis)
        self._keeps_positions = row.keyword_rule is not Keywords.BECOME_POSITIONAL

    def run(
        self,
        transformed: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The output of a call; what JAX transformed takes the groups of leaves."""
        try:
            return self._run(transformed, args, kwargs)
        except Exception as error:
            if outside.is_of_donation(error):  # of `pmap`
                Call(self._f, self._row, args, kwargs).explain(error)
            raise

    def _run(
        self,
        transformed: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        row = self._row
        # Keywords and defaults may become positions.
        is_complete = self._keeps_positions or len(args) >= row.inputs.count
        may_plan = self._may_plan and is_complete and not kwargs
        if may_plan and not running.stack.observers:
            running.note_arguments(row.identity, args, kwargs)
            out = self._plans.call(transformed, args, kwargs)
            if out is not NO_PLAN:
                return out
        made = stamps.clock.now
        call = Call(self._f, row, args, kwargs)
        # Many are called once, and never again: on the line that makes them.
        if may_plan and self._is_called:
            self._plans.learn(args, kwargs, call.packed, made)
        self._is_called = True
        return call.run(transformed)
