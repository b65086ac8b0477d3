"""Calls that cost what JAX costs: the memo of pack.

Between two steps of a training loop only the values of Variables change. So what
`outside.Call` found out about its arguments is kept as a `Plan` for the next call with
the same objects, which is found by the objects in the arguments, and asks its `Survey`
if it still holds. What a planned call does is in ``planned_calls.py``.

For the same objects there may be several plans, which differ in static values: of a
model in training and in evaluation. A survey holds again when these are what they were.

Plans refer to the objects of the caller weakly, and go with them. Variables that are
arguments by themselves may be new ones at each call (see ``loose_variables.py``). In
tree mode so may all objects (see ``tree_plans.py``).
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from graftree import _jax
from graftree.core import stamps
from graftree.core.graph import flattening, freshness, nodes
from graftree.core.graph.flattening import RefMap
from graftree.core.graph.freshness import Survey
from graftree.core.graph.nodes import Leaf
from graftree.core.objects import running
from graftree.core.objects.bookkeeping import state_of
from graftree.core.variables import variables
from graftree.transforms.crossing import arguments
from graftree.transforms.crossing.packing import Packed, Values
from graftree.transforms.crossing.plans import planned_calls, readers
from graftree.transforms.crossing.plans.loose_variables import LooseVariables
from graftree.transforms.crossing.plans.planned_calls import NO_PLAN, Arguments, Plan
from graftree.transforms.crossing.plans.tree_plans import TreePlans
from graftree.transforms.crossing.rows import Row

# How many combinations of objects a function remembers. Those that are gone are
# forgotten at once; so this is about how many models take turns. For each there are as
# many plans as `freshness.with_newest` keeps.
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
            *tree, statics = arguments.take(row.statics, *tree, row.name)
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
            plan = PlanOfObjects(row, known, packed, weak_roots, survey, loose)
        except (LookupError, StopIteration):
            return  # Another thread has changed an object since it was packed.
        self._known[key] = freshness.with_newest(plan, self._known.get(key, ()))
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
        survey: Tells whether the objects are as they were.
    """

    def __init__(
        self,
        row: Row,
        known: Arguments,
        packed: Packed,
        roots: list[weakref.ref[Any]],
        survey: Survey,
        loose: LooseVariables,
    ) -> None:
        sources = planned_calls.sources(row, known.tree, packed)
        super().__init__(row, known.leaves, packed, survey, loose, sources, roots)
        self.survey = survey
        # The leaves of a call may be all there is.
        self._is_flat = not row.statics and _are_same(known.tree[0], known.leaves)
        self._reader = None
        if not (row.statics or self._is_flat):
            self._reader = readers.make(known.tree, known.leaves)

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
        survey = self.survey
        if stamps.clock.now != survey.checked or survey.has_contents:
            if not survey.holds():
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
