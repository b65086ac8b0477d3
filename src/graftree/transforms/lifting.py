"""A JAX transform over objects, as a row of a table: prefix in, JAX call, prefix out.

The leaves of a call are parted into groups, one per distinct value of the prefix (an
axis, a sharding, a role). The traced function takes these groups. It returns static
data, and flat lists of leaves in groups again: the changed inputs and the new leaves of
their structure by the prefix of the inputs, the output by its own.

    Row       what there is to say about a transform
    Call      the outside of a call: packed arguments in, committed output out
    Inside    the inside of a call: objects for the function, its effects as a result
    lift      the two around a JAX transform
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from graftree.core.skeletons import VariableDef
from graftree.transforms import (
    aliasing,
    arguments,
    axis_names,
    boundary,
    decorators,
    packing,
)
from graftree.transforms.arguments import Chosen
from graftree.transforms.boundary import Collected, Crossing, Returned
from graftree.transforms.packing import Changes, Values
from graftree.transforms.prefixes import Assignment
from graftree.transforms.propagation import Propagation


@dataclasses.dataclass(frozen=True)
class Row:
    """What is lifted, and how.

    Attributes:
        name: The public name of the transform.
        mode: What propagates.
        inputs: The prefix of ``(args, kwargs)``, without the static arguments.
        outputs: The prefix of the output.
        statics: Which arguments are static.
        keeps_keywords: Whether keyword arguments stay keywords with graph updates; else
            they are turned into positional ones, which have a prefix.
        axis_metadata: What is told to Variables whose axis the transform takes away
            inside: the ``transform_metadata`` of the public functions.
        returns_unchanged: Tells by the value of its prefix whether a Variable comes
            back also if the function didn't change it.
        returns_captured: Whether objects of an outer trace may be returned, as copies.
        is_detached: Whether nothing reaches the caller's objects, and the output is
            made of new ones.
    """

    name: str
    mode: Propagation
    inputs: Assignment
    outputs: Assignment
    statics: Chosen = Chosen()  # noqa: RUF009
    keeps_keywords: bool = False
    axis_metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    returns_unchanged: Callable[[Any], bool] = lambda _: False
    returns_captured: bool = False
    is_detached: bool = False

    @staticmethod
    def uniform(name: str, mode: Propagation, **options: Any) -> Row:
        """The row of a transform that treats all leaves alike."""
        both = Assignment(None, "args", name, mode)
        return Row(name, mode, both, both, **options)


def lift(
    f: Callable[..., Any],
    transform: Callable[[Callable[..., Any], Any, Any], Callable[..., Any]],
    row: Row,
) -> Callable[..., Any]:
    """Applies a JAX transform to a function over objects.

    Args:
        f: The function.
        transform: Called as ``transform(inner, in_prefix, out_prefix)``; ``inner``
            takes one group of leaves per entry of the tuple ``in_prefix``.
        row: What else there is to say.

    Returns:
        A function with the arguments of ``f``.
    """
    ins, outs = row.inputs.values, row.outputs.values
    inner = transform(interior(f, row), ins, (None, ins, ins, outs))

    @decorators.wraps(f)
    def lifted(*args: Any, **kwargs: Any) -> Any:
        call = Call(f, row, args, kwargs)
        return call.commit(inner(*call.groups))

    return lifted


def interior(f: Callable[..., Any], row: Row) -> Callable[..., Any]:
    """What JAX traces: a function of groups of leaves that returns a result."""

    def traced(*groups: Values) -> Any:
        inside = Inside(row, groups)
        return inside.leave(inside.run(f))

    return decorators.named_after(f, traced)


# Outside.


class Call:
    """The outside of one call.

    Args:
        f: The function; tells the positions of keyword arguments.
        row: The transform.
        args: The positional arguments.
        kwargs: The keyword arguments.

    Attributes:
        packed: The arguments, taken apart.
        groups: What JAX gets: one group of leaves per value of the prefix.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        row: Row,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        if row.mode.structure and not row.keeps_keywords:
            args, kwargs = decorators.to_positions(f, args, kwargs), {}
        args, kwargs, statics = arguments.take(row.statics, args, kwargs, row.name)
        self.packed = packing.pack((args, kwargs), row.mode, row.name, statics)
        roles = row.inputs.assign(self.packed.skeleton, self.packed.leaves)
        self.groups = packing.part(self.packed, roles, len(row.inputs.values))

    def commit(self, result: Any) -> Any:
        """Writes a result of `Inside.leave` to the caller's objects.

        Returns:
            The output of the function.
        """
        places, *groups = result
        lists = [
            _in_order(lists, numbers)
            for lists, numbers in zip(groups, places[1:], strict=True)
        ]
        return boundary.commit(self.packed, places.returned, *lists)


def _in_order(groups: Sequence[Any], numbers: Sequence[int]) -> Sequence[Any]:
    """The leaves of some groups in one list, by the number of the group of each."""
    if len(groups) == 1:
        return groups[0]
    iterators = [iter(group) for group in groups]
    return [next(iterators[number]) for number in numbers]


# Inside.


class Places(NamedTuple):
    """The static part of a result, and the group of each leaf in it."""

    returned: Returned
    changed: tuple[int, ...]
    structure: tuple[int, ...]
    out: tuple[int, ...]


jax.tree_util.register_static(Places)


class Inside:
    """The inside of one call: the arguments as fresh objects of the current trace.

    Args:
        row: The transform.
        groups: What JAX gives: groups of leaves, in the order of the prefix values.

    Attributes:
        skeleton: The static part of the arguments.
        roles: For each leaf the number of its group.
        crossing: The arguments, and what they were made of.
    """

    def __init__(self, row: Row, groups: Sequence[Values]) -> None:
        self.row = row
        self.skeleton, values = packing.join(groups)
        self.roles = [0] * len(values)
        for number, group in enumerate(groups):
            for position in group.positions or ():
                self.roles[position] = number
        self.crossing = Crossing(
            self.skeleton,
            values,
            row.mode,
            row.name,
            returns_captured=row.returns_captured,
            is_detached=row.is_detached,
        )

    @functools.cached_property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and the keyword arguments, static ones included."""
        return arguments.put(self.crossing.tree, self.skeleton.statics)

    def run(self, f: Callable[..., Any]) -> Any:
        """The output of the function for these arguments."""
        args, kwargs = self.arguments
        if not self.row.axis_metadata:
            return f(*args, **kwargs)
        axes = [self.row.inputs.values[role] for role in self.roles]
        mapped = axis_names.mapped_variables(self.crossing, axes)
        with axis_names.hidden(mapped, self.row.axis_metadata):
            out = f(*args, **kwargs)
            given = self.row.outputs.occurrences(out, self.row.mode.sharing)
            axis_names.add_to_new(given, mapped, self.row.axis_metadata)
        return out

    def leave(self, out: Any) -> Any:
        """The result: what the function did to its arguments, and its output.

        Returns:
            A pytree ``(places, changed, structure, out)``. All but `Places` are groups
            of raw values: the first two by the prefix of the inputs, the third by that
            of the output.

        Raises:
            ValueError: If the output contains what can't leave the trace, or an object
                with different prefixes.
        """
        row = self.row
        found = self.crossing.collect(out, self._returned_unchanged())
        self._check_consistent(out)
        changed, structure, outputs = self._groups_of(found)
        ins, outs = len(row.inputs.values), len(row.outputs.values)
        names = self.skeleton.names()
        changes = zip(found.returned.changed, found.changed, strict=True)
        return (
            Places(found.returned, changed, structure, outputs),
            tuple(
                Changes([value for _, value in group], [names[i] for i, _ in group])
                for group in _in_groups(changes, changed, ins)
            ),
            _in_groups(found.structure.values(), structure, ins),
            _in_groups(found.out.values(), outputs, outs),
        )

    def _returned_unchanged(self) -> frozenset[int]:
        flags = [*map(self.row.returns_unchanged, self.row.inputs.values)]
        if not any(flags):
            return frozenset()
        definitions = self.skeleton.definitions()
        return frozenset(
            i
            for i, role in enumerate(self.roles)
            if flags[role] and isinstance(definitions[i], VariableDef)
        )

    def _groups_of(self, found: Collected) -> tuple[tuple[int, ...], ...]:
        """The group of each leaf that leaves: changes, structure, output."""
        row, returned = self.row, found.returned
        changed = [self.roles[position] for position in returned.changed]
        structure: Sequence[int] = ()
        if returned.structure is not None:
            structure = row.inputs.assign(returned.structure, found.structure.objects)
        outputs = row.outputs.assign(returned.out, found.out.objects)
        return (
            tuple(changed),
            tuple(itertools.compress(structure, found.structure.is_new)),
            tuple(itertools.compress(outputs, found.out.is_new)),
        )

    def _check_consistent(self, out: Any) -> None:
        row = self.row
        prefixes = {*row.inputs.prefixes, *row.outputs.prefixes}
        if len(prefixes) == 1 or not row.mode.sharing:
            return
        occurrences = [
            (path[1:], leaf, prefix)
            for path, leaf, prefix in row.inputs.occurrences(self.crossing.tree, True)
        ]
        if row.mode.structure:
            occurrences += row.outputs.occurrences(out, True)
        aliasing.check_consistent(row.name, occurrences)


def _in_groups(
    leaves: Iterable[Any], numbers: Sequence[int], count: int
) -> tuple[list[Any], ...]:
    groups: tuple[list[Any], ...] = tuple([] for _ in range(count))
    for leaf, number in zip(leaves, numbers, strict=True):
        groups[number].append(leaf)
    return groups
