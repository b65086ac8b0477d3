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
from graftree.core.graph.nodes import Leaf
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
        row: Row,
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
        self.is_flat = may_read and packing.are_same(tree[0], leaves)
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
            numbers[id(x)] if id(x) in numbers else _weakly(x)
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
        self._latest: tuple[Returned | None, Sequence[Any] | None] = (None, None)

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
        result = jitted(*groups)
        returned = result[0]
        latest, targets = self._latest
        if latest is not returned:
            targets = self._targets(returned)
            self._latest = returned, targets
        if targets is None or boxes or self._has_prefixes or returned.variables:
            return self._commit(result, targets, found, boxes)
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
        values: Sequence[Any],
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
            return outside.commit(self._packed(values, boxes), result)
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


def reader(
    tree: tuple[Any, ...], leaves: Sequence[Any]
) -> Callable[[Any], list[Any] | None] | None:
    """A reader for trees like this one, which has these leaves in this order.

    It gives the leaves of another one, of any kind, or ``None`` if its containers
    differ. JAX does so in C; but takes States apart in Python, so it gets their dicts.
    """
    members, treedef = jax.tree.flatten(
        tree, is_leaf=lambda x: type(x) is State or nodes.is_graph_node(x)
    )
    try:
        nested = [
            (place, jax.tree.structure(x.raw_mapping, is_leaf=nodes.is_graph_node))
            for place, x in enumerate(members)
            if type(x) is State
        ]
    except ValueError:  # keys that only a State can sort
        return None
    nested.reverse()

    def read(other: Any) -> list[Any] | None:
        try:
            found = treedef.flatten_up_to(other)
            for place, inner in nested:
                if type(found[place]) is not State:
                    return None
                mapping = found[place].raw_mapping
                found[place : place + 1] = inner.flatten_up_to(mapping)
        except ValueError:
            return None
        return found

    return read if packing.are_same(read(tree) or (), leaves) else None
