"""The inside of a loop: some leaves go round, some are scanned, the others stay.

A loop is a call with one step. `Loop.step` is what JAX's loop runs as its body. There,
`Inside` rebuilds all arguments from the leaves that go round, the slices of those that
are scanned, and those that stay as they are. What the step did, and where each leaf of
that is found after the loop, is noted in Python (`captures` says why that is right).
`Loop.finish` puts it together.

An array ref stays outside the loop, and the steps write to it in place. Where JAX can't
do that, its content goes round or is scanned, each step has a ref of its own, and the
last content is written to the caller's.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from graftree import _jax
from graftree.core.graph import differences, flattening
from graftree.core.graph.flattening import IndexMap, RefMap
from graftree.core.graph.graphdefs import GraphDef, VariableDef
from graftree.core.variables.variables import Variable
from graftree.transforms.crossing import packing, reports, signatures
from graftree.transforms.crossing.inside import (
    Collected,
    Inside,
    Leaf,
    Linked,
    Returned,
)
from graftree.transforms.crossing.packing import Values
from graftree.transforms.crossing.rows import Row
from graftree.transforms.crossing.signatures import Signature


class Carry:
    """In the axes of `scan`: what goes from one step to the next.

    The class itself is used, not an instance of it.

    Example:
        >>> def add(total, x):
        ...     return total + x, total
        >>> cumulate = nnx.scan(add, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        >>> total, before = cumulate(jnp.array(0), jnp.arange(4))
        >>> int(total), before.tolist()
        (6, [0, 0, 1, 3])
    """


# Where a leaf is after the loop: stacked, at a number in the list of what every step
# returned; or carried, at a position among the arguments.


@dataclasses.dataclass(frozen=True)
class _Stacked:
    number: int
    axis: int


@dataclasses.dataclass(frozen=True)
class _Carried:
    position: int


_Source = _Stacked | _Carried


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the carry is in the arguments and in the output of the step.

    Attributes:
        argument: The number of the positional argument; ``None`` if there is no carry.
        output: The number in a tuple of outputs; ``None`` if it is the whole output.
        takes_new_variables: Whether a Variable that is itself a leaf of the carry may
            come back as another one.
        identity: The rule that other objects break, for the message.
    """

    argument: int | None
    output: int | None = None
    takes_new_variables: bool = False
    identity: str = ""

    def split(self, out: Any) -> tuple[Any, Any]:
        """The carry of an output, and the output without it."""
        if self.argument is None:
            return None, out
        if self.output is None:
            return out, None
        number = self.output
        if not isinstance(out, (tuple, list)) or len(out) <= number:
            raise ValueError(
                f"The function must return a tuple with the carry at index {number}, "
                f"as out_axes says, got {type(out).__name__}."
            )
        return out[number], (*out[:number], None, *out[number + 1 :])


class Loop:
    """One loop, while it is traced.

    In the prefix of its inputs, integers are scanned axes, `Carry` goes round, and
    ``None`` stays: without graph updates the Variables there go round, too. The content
    of refs goes round where JAX can't leave them outside (``moves_refs``).

    Attributes:
        initial: The leaves that go round, as they are before the first step.
        scanned: The leaves that are scanned, with their axis in front.
    """

    def __init__(
        self,
        row: Row,
        place: Place,
        groups: Sequence[Values],
        moves_refs: bool = False,
    ) -> None:
        self.row = row
        self.place = place
        self.signature, self.values = packing.join(groups)
        self.roles = packing.roles(groups, len(self.values))
        self._span = self.signature.span(place.argument)
        axes = [row.inputs.values[role] for role in self.roles]
        # JAX slices refs along their first axis only.
        self._moved = [
            i
            for i, (x, axis) in enumerate(zip(self.values, axes, strict=True))
            if _jax.is_ref(x) and (axis if isinstance(axis, int) else moves_refs)
        ]
        self._carried = [i for i, x in enumerate(axes) if self._goes_round(i, x)]
        self._scanned = {i: x for i, x in enumerate(axes) if isinstance(x, int)}
        self._notes: _Notes | None = None
        contents = list(self.values)
        for i in self._moved:
            contents[i] = contents[i][...]
        self.initial = self._pick(contents, self._carried)
        self.scanned = self._pick(
            [_to_front(x, self._scanned.get(i)) for i, x in enumerate(contents)],
            list(self._scanned),
        )

    def _goes_round(self, position: int, axis: Any) -> bool:
        if isinstance(axis, int):
            return False
        if _jax.is_ref(self.values[position]):
            return position in self._moved
        is_variable = self.signature.slots[position].variable is not None
        return axis is not None or (is_variable and not self.row.mode.structure)

    def _pick(self, values: Sequence[Any], positions: Sequence[int]) -> Values:
        return Values([values[i] for i in positions], self.signature, tuple(positions))

    def inside(self, carried: Values, scanned: Values | None = None) -> Inside:
        """The arguments of one step."""
        values = list(self.values)
        for group in (carried, scanned):
            if group is not None:
                for position, value in group.by_position().items():
                    values[position] = value
        for position in self._moved:
            values[position] = _jax.new_ref(values[position])
        count = len(self.row.inputs.values)
        groups = packing.part(values, self.signature, self.roles, count)
        return Inside(self.row, groups)

    def step(
        self, f: Callable[..., Any], carried: Values, scanned: Values | None = None
    ) -> tuple[Values, list[Any]]:
        """Runs the user's function once: leaves for the next step, what is stacked."""
        inside = self.inside(carried, scanned)
        before = _Form(self, self._argument(inside))
        out = inside.run(f)
        carry, others = self.place.split(out)
        after = _Form(self, carry)
        after.check_same(before)
        found = inside.collect(out, Linked(after.variables(), others))
        stacked: list[Any] = []
        aligned = self._align(found)
        returned, sources = self._find_sources(found, aligned, stacked)
        values = self._next_values(inside, aligned.structure, after)
        for position in self._moved:
            values[position] = inside.values[position][...]
        refs = [self._source_of_ref(i, values, stacked) for i in self._moved]
        self._notes = _Notes(returned, sources, refs)
        return self._pick(values, self._carried), stacked

    def _source_of_ref(
        self, position: int, values: list[Any], stacked: list[Any]
    ) -> _Source:
        if position not in self._scanned:
            return _Carried(position)
        stacked.append(values[position])
        return _Stacked(len(stacked) - 1, self._scanned[position])

    def _argument(self, inside: Inside) -> Any:
        number = self.place.argument
        return None if number is None else inside.tree[0][number]

    def _next_values(
        self, inside: Inside, structure: Sequence[_Aligned], carry: _Form
    ) -> list[Any]:
        """The raw values of all leaves after the step."""
        values = [inside.current(i) for i in range(len(self.values))]
        # Arrays that are attributes may have been replaced.
        for leaf, position in structure:
            if position is not None:
                values[position] = leaf.value
        position = self._span.leaves[0]
        entries = self.signature.entries[slice(*self._span.entries)]
        for entry, leaves in zip(entries, carry.parts(), strict=True):
            count = signatures.count(entry)
            # There are fewer here if an earlier argument has the same Variable.
            if count == len(leaves):
                values[position : position + count] = map(flattening.raw_of, leaves)
            position += count
        return values

    def _find_sources(
        self, found: Collected, aligned: _Leaving, stacked: list[Any]
    ) -> tuple[Returned, list[list[_Source]]]:
        """What leaves the loop, and where each leaf of it is found then."""
        ins, outs = self.row.inputs.values, self.row.outputs.values
        changed = [(leaf, leaf.position) for leaf in found.changed]
        if self.row.mode.structure:
            dropped = {i for leaf, i in changed if ins[leaf.group] is None}
            changed = [pair for pair in changed if pair[1] not in dropped]
            self._warn(dropped)

        def place(axes: Sequence[Any], leaf: Leaf, position: int | None) -> _Source:
            axis = axes[leaf.group]
            if isinstance(axis, int):
                stacked.append(leaf.value)
                return _Stacked(len(stacked) - 1, axis)
            if position is None:
                raise TypeError(
                    f"nnx.{self.row.name}: the structure of a carried or broadcast "
                    "argument must not change, but it has new data.\nAdd it before the "
                    "loop, or give the argument an axis."
                )
            return _Carried(position)

        sources = [
            [place(ins, *pair) for pair in changed],
            [place(ins, *pair) for pair in aligned.structure],
            [place(outs, *pair) for pair in aligned.out],
        ]
        positions = tuple(position for _, position in changed)
        # After the loop, each part is one group.
        groups = tuple((0,) * len(part) for part in sources)
        returned = dataclasses.replace(found.returned, changed=positions, groups=groups)
        return returned, sources

    def _warn(self, dropped: set[int]) -> None:
        axes = self.row.inputs.tree[0]
        if isinstance(axes, tuple):
            for number, axis in enumerate(axes):
                if axis is not None:  # by filters, it is meant
                    dropped = dropped - {*range(*self.signature.span(number).leaves)}
        slots = self.signature.slots
        reports.warn_of_broadcasts(slots[i].name for i in sorted(dropped))

    def _align(self, found: Collected) -> _Leaving:
        """For each new leaf of the structure and output the argument in its place."""
        structure, out = found.returned.structure, found.returned.out
        start = 0  # of the carry in the output
        if self.place.output is not None:
            children = out.treedef.children()[: self.place.output]
            start = sum(child.num_leaves for child in children)
        in_out = self._positions(out, self._span.entries[0] - start)
        in_structure = [] if structure is None else self._positions(structure, 0)
        return _Leaving(
            [(leaf, in_structure[leaf.position]) for leaf in found.structure],
            [(leaf, in_out[leaf.position]) for leaf in found.out],
        )

    def _positions(self, signature: Signature, shift: int) -> list[int | None]:
        """For each leaf of a signature the position of the argument in its place."""
        olds = self.signature.entries
        starts = [0, *itertools.accumulate(map(signatures.count, olds))]
        found: list[int | None] = []
        for number, entry in enumerate(signature.entries, shift):
            is_argument = 0 <= number < len(olds)
            if is_argument and _paths(entry) == _paths(olds[number]):
                found += range(starts[number], starts[number + 1])
            else:
                found += [None] * signatures.count(entry)
        return found

    def finish(self, carried: Values, stacked: Sequence[Any]) -> Any:
        """What `Call.commit` takes, after the loop."""
        assert self._notes is not None, "JAX traces the step before the loop ends"
        last = dict(zip(self._carried, carried.values, strict=True))

        def value(source: _Source) -> Any:
            if isinstance(source, _Stacked):
                return _from_front(stacked[source.number], source.axis)
            position = source.position
            return last[position] if position in last else self.values[position]

        returned, sources, refs = self._notes
        for position, source in zip(self._moved, refs, strict=True):
            self.values[position][...] = value(source)
        return returned, *([[*map(value, listed)]] for listed in sources)


class _Notes(NamedTuple):
    """What was found out about a loop while its step was traced.

    Attributes:
        returned: The static part of what leaves it.
        sources: Where the leaves are: of what changed, the structure, the output.
        refs: The same of the content of refs that was moved.
    """

    returned: Returned
    sources: list[list[_Source]]
    refs: list[_Source]


# A leaf that leaves a step, and the position of the argument in its place.
_Aligned = tuple[Leaf, int | None]


class _Leaving(NamedTuple):
    """The new leaves of the structure and of the output."""

    structure: list[_Aligned]
    out: list[_Aligned]


def _paths(entry: GraphDef[Any] | None) -> Any:
    return None if entry is None else entry.paths()


def _to_front(value: Any, axis: int | None) -> Any:
    if axis is None:
        return value
    for x in jax.tree.leaves(value):
        if not -jnp.ndim(x) <= axis < jnp.ndim(x):
            raise ValueError(
                f"nnx.scan can't scan axis {axis} of an array of shape {jnp.shape(x)}: "
                "it has no such axis."
            )
    return jax.tree.map(lambda x: jnp.moveaxis(x, axis, 0), value) if axis else value


def _from_front(value: Any, axis: int) -> Any:
    if not axis:
        return value
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, axis), value)


class _Form:
    """The form of a carry: its structure, and which objects are in it."""

    def __init__(self, loop: Loop, tree: Any) -> None:
        self.row = row = loop.row
        self.place = loop.place
        self.refs = RefMap()
        self.treedef, self.entries, self.leaves = packing.take_apart(
            tree, row.mode, self.refs, RefMap(), row.name
        )

    def variables(self) -> list[Any]:
        """The Variables and refs in it."""
        return [x for x in self.refs if isinstance(x, Variable) or _jax.is_ref(x)]

    def parts(self) -> Iterator[list[Any]]:
        """The leaves of each entry."""
        start = 0
        for entry in self.entries:
            end = start + signatures.count(entry)
            yield self.leaves[start:end]
            start = end

    def check_same(self, before: _Form) -> None:
        """Refuses a carry with other objects, or of another structure."""
        if self.row.mode.structure:
            if not _are_same(self._roots(), before._roots()):
                raise self._references_error()
        elif not _are_same(self.variables(), before.variables()):
            raise ValueError(
                f"{self.row.name} Variable identity must be preserved across "
                "iterations: the carry has other Variables out than in, or has them "
                "in other places.\nWrite to them in place (`variable[...] = value`)."
            )
        if self.treedef != before.treedef or self.entries != before.entries:
            raise self._structure_error(before)
        if self.row.mode.structure and not _are_same(
            self._inner_objects(), before._inner_objects()
        ):
            raise self._references_error()

    def _roots(self) -> list[Any]:
        """The objects that are entries, but Variables."""
        objects = IndexMap.from_refmap(self.refs)
        first = [entry.nodes[0] for entry in self.entries if entry is not None]
        return [objects[node.index] for node in first if not self._may_be_new(node)]

    def _inner_objects(self) -> list[Any]:
        first = [entry.nodes[0] for entry in self.entries if entry is not None]
        new = {node.index for node in first if self._may_be_new(node)}
        return [obj for obj, number in self.refs.items() if number not in new]

    def _may_be_new(self, node: Any) -> bool:
        return self.place.takes_new_variables and isinstance(node, VariableDef)

    def _references_error(self) -> ValueError:
        return ValueError(
            f"{self.place.identity}, but nnx.{self.row.name} got other objects back "
            "than it gave to the function.\nChange them in place, or split them and "
            "carry their State."
        )

    def _structure_error(self, before: _Form) -> TypeError:
        found = differences.between(before._facts(), self._facts())
        lines = differences.in_words(found, "before", "after", signatures.name_of)
        listed = "\n  ".join(lines or ["which objects are shared"])
        return TypeError(
            f"nnx.{self.row.name}: the structure of the carry must stay the same in a "
            f"loop, but a step changed it.\n  {listed}\nAttributes of carried objects, "
            "and metadata of carried Variables, can't be added, removed or changed "
            "there."
        )

    def _facts(self) -> dict[Any, Any]:
        return Signature(self.treedef, tuple(self.entries)).facts("carry")


def _are_same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    return len(first) == len(second) and all(map(operator.is_, first, second))
