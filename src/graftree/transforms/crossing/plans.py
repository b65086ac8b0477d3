"""Calls at the cost of JAX's own: the memo of pack.

Between two steps of a training loop only the values of Variables change. So the facts
that `outside.Call` found about its arguments are kept as a `Plan` for the next call
with the same objects. It is found by the objects in the arguments, and asks a
`StructureWatch` whether it still holds.

The same objects may have several plans, which differ in static values, as of a model in
training and in evaluation. A watch holds again when these have their old values. Plans
refer to the objects of the caller weakly, and go with them.

In tree mode JAX sees the contents of an object: its Variables and arrays are leaves,
the rest is in the treedef. So a call with new objects is recognized by the treedefs of
its arguments and by the form of the Variables.

Transforms other than `jit` trace at each call: the function may read anything. But the
work on its arguments outside is remembered as well (`RepeatedCalls`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from graftree import _jax
from graftree.core import ownership
from graftree.core.graph import nodes, watches
from graftree.core.objects import running
from graftree.core.objects.bookkeeping import state_of
from graftree.core.pickling import Rebuilt
from graftree.core.variables import partitioning
from graftree.transforms.crossing import decorators, outside, packing, planned_calls
from graftree.transforms.crossing.packing import Packed
from graftree.transforms.crossing.planned_calls import NO_PLAN, Passed, Plan
from graftree.transforms.crossing.rows import Keywords, Row

# The name of the plans for some objects in the memos of these. There are as many as
# `watches.with_newest` keeps, and none at first: a plan costs more than a call without
# one, and is made when objects come a second time.
_PLANS = "plans"


class Plans:
    """The plans of one compiled function."""

    def __init__(self, row: Row, bound: tuple[Any, ...] = ()) -> None:
        self._row = row
        self._bound = bound
        self._known = watches.Together()
        # In tree mode, for objects by their structure. Reading, adding and removing an
        # entry are atomic, so threads need no lock.
        self._of_trees: dict[Any, Plan] = {}
        self._latest_tree: tuple[Any, Plan | None] = (None, None)

    def call(
        self, jitted: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The result of a call if there is a plan for it, else `NO_PLAN`."""
        # Objects inside a trace are new ones each time. An observer wants to know the
        # counterparts of these in the trace.
        if _jax.current_trace() is not _jax.no_trace or running.stack.observers:
            return NO_PLAN
        # Most calls are like the one before.
        latest = self._known.latest
        if latest is not None:
            given = self._bound + args if self._bound else args
            is_flat = latest.is_flat and not kwargs
            read = latest.read
            leaves = given if is_flat else read and read((given, kwargs))
            if leaves is not None:
                out = latest.call(jitted, leaves)
                if out is not NO_PLAN:
                    return out
        passed = self._read(args, kwargs)
        if passed is None:
            return NO_PLAN
        memos = self._known.find(passed.key, passed.objects())
        plans = memos.get(_PLANS)
        if plans is None and self._of_trees:
            out = self._call_with_new(jitted, passed)
            if out is not NO_PLAN:
                memos[_PLANS] = ()
            return out
        for plan in plans or ():
            out = plan.call(jitted, passed.leaves)
            if out is not NO_PLAN:
                self._known.latest = plan
                return out
        return NO_PLAN

    def _call_with_new(self, jitted: Callable[..., Any], passed: Passed) -> Any:
        """`call` for objects that come for the first time."""
        tree = passed.taken_apart()
        if tree is None:
            return NO_PLAN
        latest, plan = self._latest_tree
        # Equality of the treedefs costs less than their hash.
        if plan is None or tree.key != latest:
            try:
                plan = self._of_trees.get(tree.key)
            except TypeError:
                return NO_PLAN  # a static value without a hash
            if plan is None:
                return NO_PLAN
            self._latest_tree = tree.key, plan
        return plan.call(jitted, tree.leaves)

    def learn(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], packed: Packed, made: int
    ) -> None:
        """Makes a plan from a call's findings, if its objects come a second time."""
        # A filter that reads values may group the leaves in another way each time.
        if _jax.is_tracing() or self._row.inputs.reads_leaves:
            return
        passed = self._read(args, kwargs)
        if passed is None:
            return
        objects = passed.objects()
        memos = self._known.find(passed.key, objects)
        plans = memos.get(_PLANS)
        if objects and plans is None:
            memos[_PLANS] = ()
            if not self._row.mode.sharing:
                self._learn_tree(passed, packed, made)
            return
        plan = self._made(passed, packed, made)
        if plan is not None:
            memos[_PLANS] = watches.with_newest(plan, plans or ())
            self._known.latest = plan

    def _learn_tree(self, passed: Passed, packed: Packed, made: int) -> None:
        """Makes a plan for objects with this structure."""
        tree = passed.taken_apart()
        if tree is None or not packing.are_same(tree.leaves, packed.leaves):
            return
        if any(nodes.kind_of(x) not in _LEAVES for x in tree.leaves):
            return
        plan = self._made(tree, packed, made)
        if plan is None:
            return
        for oldest in [*self._of_trees][: 1 - watches.Together.LIMIT]:
            self._of_trees.pop(oldest, None)
        try:
            self._of_trees[tree.key] = plan
        except TypeError:
            return  # a static value without a hash
        self._latest_tree = tree.key, plan

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Passed | None:
        """The key and leaves to find a plan by; ``None`` if there can be none."""
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
        return Passed((treedef, statics, *tokens), tuple(tree), leaves)

    def _made(self, passed: Passed, packed: Packed, made: int) -> Plan | None:
        """A plan from a call's findings; ``None`` if none would be right."""
        row, roots, boxes = self._row, passed.objects(), passed.variables()
        if boxes or not row.mode.sharing or packed.skeleton is None:
            watch = watches.StructureWatch.over(roots, made)
        else:
            members, objects = packed.members, packed.objects
            watch = watches.StructureWatch(packed.skeleton, members, objects, made)
        if not watch.is_complete or watch.reaches(roots):
            return None
        bare = planned_calls.BareVariables(
            boxes, watch.variables, bool(row.inputs.donated)
        )
        if not bare.may_be_planned:
            return None
        try:
            return Plan(row, passed, packed, watch, bare)
        except (LookupError, StopIteration):
            return None  # Another thread has changed an object since it was packed.


def _tokens(leaves: Sequence[Any]) -> list[Any] | None:
    """The tokens for these leaves in a key; ``None`` if some leaf has none."""
    tokens: list[Any] = []
    for x in leaves:
        kind = nodes.kind_of(x)
        if kind is nodes.PYTREE:
            # An object that lives as long as the root does, with a hash of its own.
            tokens.append(state_of(x))
        elif isinstance(kind, nodes.GraphKind) and watches.may_be_weak(x):
            tokens.append(id(x))  # it may have no hash; that it is alive is seen
        elif kind is nodes.Leaf.ARRAY or kind is nodes.Leaf.STATIC:
            tokens.append(None)
        elif kind is nodes.Leaf.VARIABLE:
            tokens.append(type(x))
        else:
            return None
    return tokens


_LEAVES = (nodes.Leaf.VARIABLE, nodes.Leaf.ARRAY, nodes.Leaf.STATIC)


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
        # Values that a plan writes have no axis to be named.
        self._may_plan = partitioning.PARTITION_NAME not in row.axis_metadata
        self._keeps_positions = row.keyword_rule is not Keywords.BECOME_POSITIONAL

    def run(
        self,
        transformed: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The output of a call; ``transformed`` takes the groups of leaves."""
        row = self._row
        # Keywords and defaults may become positions.
        is_complete = self._keeps_positions or len(args) >= row.inputs.count
        may_plan = self._may_plan and is_complete and not kwargs
        try:
            if may_plan and not running.stack.observers:
                running.note_arguments(row.identity, args, kwargs)
                out = self._plans.call(transformed, args, kwargs)
                if out is not NO_PLAN:
                    return out
            made = ownership.clock.now
            call = outside.Call(self._f, row, args, kwargs)
            # Many are called once, and never again: on the line that makes them.
            if may_plan and self._is_called:
                self._plans.learn(args, kwargs, call.packed, made)
            self._is_called = True
            return call.run(transformed)
        except Exception as error:
            if outside.is_of_donation(error):  # of `pmap`
                outside.Call(self._f, row, args, kwargs).explain(error)
            raise
