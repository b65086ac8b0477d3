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

import contextlib
import itertools
import operator
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax

from graftree import _jax, errors
from graftree.config import GRAPH
from graftree.core import ownership, paths, pickling
from graftree.core.graph import flattening, nodes, watches
from graftree.core.graph.nodes import Leaf
from graftree.core.objects import bookkeeping, callables, running
from graftree.core.states.states import Containers
from graftree.core.variables import partitioning, variables
from graftree.core.variables.variables import Variable
from graftree.transforms.crossing import decorators, inside, outside, packing, rows
from graftree.transforms.crossing.packing import Packed, Values
from graftree.transforms.crossing.programs import compilations

# Stands for the result of a call that has no plan.
NO_PLAN: Any = object()


class Passed(NamedTuple):
    """The arguments of a call, as plans see them.

    Attributes:
        key: The key of a plan.
        tree: ``(args, kwargs)`` without the static ones, third what the functions hold;
            ``None`` if the objects in it were taken apart, too.
        leaves: The leaves of the tree: objects, Variables, arrays and other values.
    """

    key: tuple[Any, ...]
    tree: Any
    leaves: Sequence[Any]

    def objects(self) -> list[Any]:
        """Those leaves that are objects."""
        return [x for x in self.leaves if nodes.is_node_module(x)]

    def taken_apart(self) -> Passed | None:
        """The same with the leaves of its objects; ``None`` if one contains itself."""
        try:
            leaves, treedef = nodes.flatten(self.tree)
        except ValueError:
            return None
        return Passed((treedef, self.key[1]), None, leaves)


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
        read: Gives the leaves of other arguments; ``None`` if they may not fit.
    """

    def __init__(
        self,
        row: rows.Row,
        passed: Passed,
        packed: Packed,
        watch: watches.StructureWatch,
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
        held = row.held_leaves
        self.is_flat = (
            may_read
            and held is not None
            and packing.are_same((*tree[0], *held), leaves)
        )
        self.read = reader(tree, leaves) if may_read and not self.is_flat else None
        bare_at = [n for n, x in enumerate(leaves) if nodes.kind_of(x) is Leaf.VARIABLE]
        numbers = {id(leaves[place]): n for n, place in enumerate(bare_at)}
        self._bare, self._pick_bare = bare, _picker(bare_at) if bare_at else None
        # Those of objects, the numbers of bare ones, and None for other leaves.
        self._variables = [
            numbers.get(id(x), x) if isinstance(x, Variable) else None
            for x in packed.leaves
        ]
        self._attached = [x for x in self._variables if isinstance(x, Variable)]
        self._is_plain = variables.may_replace_all(self._attached, ())
        self._sources = self._numbered_sources(passed, packed, len(bare_at))
        self._objects = [
            weakref.ref(x) if nodes.is_node_module(x) else numbers.get(id(x), x)
            for x in packed.objects.values()
        ]
        # Most calls have one group, which takes all of them in order.
        in_order = [*range(len(self._sources))]
        self._groups = [
            (None if places == in_order else _picker(places), static)
            for places, static in outside.groups(row, packed, self._sources)
        ]
        self._may_donate_twice = bool(row.inputs.donated) and any(
            map(outside.is_spread, packed.values())
        )
        self._has_prefixes = row.has_prefixes
        # Usually the same ones in each step.
        self._latest: tuple[inside.Returned | None, Sequence[Any] | None] = (None, None)

    def _numbered_sources(self, passed: Passed, packed: Packed, bare: int) -> list[int]:
        """For each leaf its number among the values that a call reads.

        These are the values of Variables, in objects and then bare ones; then leaves of
        the arguments, attributes of objects, and leaves that stay: the contents of a
        container are the same as long as the watch holds.
        """
        places = _places(passed, packed)
        others = zip(places, packed.leaves, self._variables, strict=True)
        self._attributes = [x for x in places if isinstance(x, watches.Attribute)]
        self._constants = [x for at, x, known in others if at is None and known is None]
        kinds = enumerate(map(nodes.kind_of, passed.leaves))
        given = (n for n, kind in kinds if kind in (Leaf.ARRAY, Leaf.STATIC))
        attributes = itertools.count(len(passed.leaves))
        constants = itertools.count(len(passed.leaves) + len(self._attributes))
        picked: list[int] = []
        numbers: list[int] = []
        attached, first = itertools.count(), len(self._attached) + bare
        for place, known in zip(places, self._variables, strict=True):
            if type(known) is int:
                numbers.append(len(self._attached) + known)
            elif known is not None:
                numbers.append(next(attached))
            else:
                numbers.append(first + len(picked))
                rest = constants if place is None else attributes
                picked.append(next(given if place is _GIVEN else rest))
        self._pick_others = _picker(picked)
        return numbers

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
        found = variables.read_all(self._attached)
        found += values
        found += self._pick_others(leaves)
        groups = []
        for pick, static in self._groups:
            groups.append(Values((found if pick is None else pick(found), static)))
        if self._may_donate_twice and outside.donates_twice(self._row, groups):
            return NO_PLAN
        compiled = compilations.count
        result = jitted(*groups)
        if compilations.count != compiled and self.traces is not None:
            errors.fenced(self.traces.called, self.signature, found, compiled)
        returned = result[0]
        latest, targets = self._latest
        if latest is not returned:
            targets = self._targets(returned)
            self._latest = returned, targets
        is_plain = targets is not None and not (targets and boxes)
        if not is_plain or self._has_prefixes or returned.links:
            return self._commit(result, targets, found, boxes)
        if targets:
            variables.replace_all(targets, result[1])
        return returned.build(result[3])

    def _targets(self, returned: inside.Returned) -> Sequence[Any] | None:
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
        values: Sequence[Any],
        boxes: Sequence[Variable[Any]],
    ) -> Any:
        """`outside.commit`; less to do if only Variables are written and returned."""
        returned, changed, _, out = result
        if targets is not None:
            targets = [boxes[x] if type(x) is int else x for x in targets]
            # Those of objects were checked when the plan was made.
            if boxes and targets and not variables.may_replace_all(targets, ()):
                targets = None
        if targets is None:
            return outside.commit(self._packed(values, boxes), result)
        if self._has_prefixes:
            _, changed, _, out = outside.in_order(result)
        variables.replace_all(targets, changed)
        if not returned.links:
            return returned.build(out)
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

    def _packed(self, values: Sequence[Any], boxes: Sequence[Variable[Any]]) -> Packed:
        """The result of `packing.pack` for these arguments."""
        pairs = zip(self._variables, self._sources, strict=True)
        found = [
            boxes[x] if type(x) is int else values[n] if x is None else x
            for x, n in pairs
        ]
        objects = enumerate(self._objects_with(boxes))
        return Packed(self.signature, found, flattening.IndexMap(objects))

    def _objects_with(self, boxes: Sequence[Variable[Any]]) -> list[Any]:
        """The objects of a call, by their numbers."""
        return [
            boxes[x] if type(x) is int else x() if isinstance(x, weakref.ref) else x
            for x in self._objects
        ]


# Stands for where a leaf of the arguments is that is in no object.
_GIVEN: Any = object()


def _places(passed: Passed, packed: Packed) -> list[Any]:
    """For each leaf `_GIVEN`, or the attribute that has it; ``None`` if none does."""
    slots, tree = packed.signature.slots, passed.tree
    if tree is None:  # the objects were taken apart with the arguments
        return [_GIVEN] * len(slots)
    given, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=nodes.is_node_module)
    given_paths = {paths.from_jax(path) for path, _ in given}
    entries = [*map(paths.from_jax, packed.signature.entry_paths)]
    located = [entries[slot.entry] + slot.path for slot in slots]
    return [
        None
        if slot.variable
        else _GIVEN
        if path in given_paths
        else watches.attribute_at(tree, path)
        for path, slot in zip(located, slots, strict=True)
    ]


def _picker(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that takes the members at these places out of a sequence."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    start = places[0] if places else 0
    return operator.itemgetter(slice(start, start + len(places)))


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
        self._is_fixed = all([entries.is_fixed for entries in self._metadata])
        # Those live as long as the plan, so that nothing else gets these numbers.
        self._attached = frozenset(map(id, attached))
        has_refs = any([entries["ref"] for entries in self._metadata])
        self.may_be_planned = not has_refs and self._fit(boxes)

    def read(self, boxes: Sequence[Variable[Any]]) -> list[Any] | None:
        """Their raw values; ``None`` if they are not like the earlier ones."""
        metadata = [x.__nnx_metadata__ for x in boxes]
        if metadata != self._metadata:
            return None
        # Those of the next call are usually the same objects, which is seen at once;
        # but changes in them are not.
        if self._is_fixed:
            self._metadata = metadata
        return variables.read_all(boxes) if self._fit(boxes) else None

    def _fit(self, boxes: Sequence[Variable[Any]]) -> bool:
        """Whether each is there once, and can be written if it must be."""
        numbers = {id(x) for x in boxes}
        if len(numbers) != len(boxes) or not self._attached.isdisjoint(numbers):
            return False
        return not self._are_written or variables.may_replace_all(boxes, ())


def reader(
    tree: tuple[Any, ...], leaves: Sequence[Any]
) -> Callable[[Any], list[Any] | None] | None:
    """A reader for trees like this one, which has these leaves in this order.

    It gives the leaves of another one, of any kind, or ``None`` if its containers
    differ.
    """
    try:
        containers = Containers(tree, nodes.is_graph_node, _content_of)
    except ValueError:  # keys that only a State can sort
        return None
    read = containers.leaves
    return read if packing.are_same(read(tree) or (), leaves) else None


def _content_of(x: Any) -> Any:
    """What JAX shall take apart instead of a callable; else ``None``."""
    whole = callables.opened(x)
    return whole if type(whole) is callables.Opened else None


# The name of the plans for some objects in the memos of these. There are as many as
# `watches.with_newest` keeps, and none at first: a plan costs more than a call without
# one, and is made when objects come a second time.
_PLANS = "plans"


class Plans:
    """The plans of one compiled function."""

    def __init__(self, row: rows.Row, bound: tuple[Any, ...] = ()) -> None:
        self._row = row
        self._bound, self._held = bound, row.held_leaves
        self._known = watches.Together()
        # In tree mode, for objects by their structure. Reading, adding and removing an
        # entry are atomic, so threads need no lock.
        self._of_trees: dict[Any, Plan] = {}

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
            if latest.is_flat and not kwargs:
                leaves = given + self._held if self._held else given
            else:
                read = latest.read
                is_bare = self._held == ()
                tree = (given, kwargs) if is_bare else self._row.tree(given, kwargs)
                leaves = read and read(tree)
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
        try:
            plan = self._of_trees.get(tree.key)
        except TypeError:
            return NO_PLAN  # a static value without a hash
        return NO_PLAN if plan is None else plan.call(jitted, tree.leaves)

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
        with contextlib.suppress(TypeError):  # a static value without a hash
            self._of_trees[tree.key] = plan

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Passed | None:
        """The key and leaves to find a plan by; ``None`` if there can be none."""
        row, statics = self._row, ()
        args = (*self._bound, *args)
        if row.statics:
            args, kwargs, statics = decorators.take(row.statics, args, kwargs, row.name)
        tree = row.tree(args, kwargs)
        leaves: Any = (*args, *(self._held or ()))
        treedef: Any = None
        tokens = None if kwargs or self._held is None else _tokens(leaves)
        if tokens is None:  # there are containers
            tree, leaves, treedef = packing.flatten(tree, GRAPH, row.name, of_call=True)
            tokens = _tokens(leaves)
            if tokens is None:  # a ref on its own, or a type without stamps
                return None
        return Passed((treedef, statics, *tokens), tree, leaves)

    def _made(self, passed: Passed, packed: Packed, made: int) -> Plan | None:
        """A plan from a call's findings; ``None`` if none would be right."""
        row, roots = self._row, passed.objects()
        boxes = [x for x in passed.leaves if nodes.kind_of(x) is Leaf.VARIABLE]
        if boxes or not row.mode.sharing or packed.skeleton is None:
            watch = watches.StructureWatch.over(roots, made)
        else:
            members, objects = packed.members, packed.objects
            watch = watches.StructureWatch(packed.skeleton, members, objects, made)
        if not watch.is_complete or watch.reaches(roots):
            return None
        bare = BareVariables(boxes, watch.variables, bool(row.inputs.donated))
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
            tokens.append(bookkeeping.state_of(x))
        elif isinstance(kind, nodes.GraphKind) and watches.may_be_weak(x):
            tokens.append(id(x))  # it may have no hash; that it is alive is seen
        elif kind is Leaf.ARRAY:
            tokens.append(None)
        elif kind is Leaf.STATIC and type(x) not in callables.TYPES:
            tokens.append(None)
        elif kind is Leaf.VARIABLE:
            tokens.append(type(x))
        else:
            return None
    return tokens


_LEAVES = (Leaf.VARIABLE, Leaf.ARRAY, Leaf.STATIC)


class RepeatedCalls(pickling.Rebuilt):
    """The calls of one function in one transform.

    Args:
        f: The function.
        row: Its transform.

    Attributes:
        row: As given.
    """

    def __init__(self, f: Callable[..., Any], row: rows.Row) -> None:
        self._f, self.row = f, row
        self._plans = Plans(row)
        self._is_called = False
        # Values that a plan writes have no axis to be named.
        self._may_plan = partitioning.PARTITION_NAME not in row.axis_metadata
        self._keeps_positions = row.keyword_rule is not rows.Keywords.BECOME_POSITIONAL

    def run(
        self,
        transformed: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The output of a call; ``transformed`` takes the groups of leaves."""
        row = self.row
        # Keywords and defaults may become positions.
        is_complete = self._keeps_positions or len(args) >= row.inputs.count
        may_plan = self._may_plan and is_complete and not kwargs
        try:
            if may_plan and not running.stack.observers:
                running.note_arguments(row, args, kwargs, row.given_functions)
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
