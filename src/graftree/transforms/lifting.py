"""`lift`: a JAX transform with a prefix of axes (or specs) in and out, over objects.

The leaves of a call are parted into groups, one per distinct value of the prefix. The
traced function takes these groups and returns, besides the static part, the changed
inputs and the new leaves of their structure in the same groups, and the output in
groups of its own. So a transform is a row of a table: prefix in, JAX call, prefix out.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from graftree.core import partitioning
from graftree.core.variables import Variable
from graftree.transforms import aliasing, boundary, decorators, packing
from graftree.transforms.boundary import Crossing, Returned
from graftree.transforms.packing import Values
from graftree.transforms.prefixes import Assignment
from graftree.transforms.propagation import Propagation


@dataclasses.dataclass(frozen=True)
class Row:
    """What is lifted, and how.

    Attributes:
        name: The public name of the transform.
        mode: What propagates.
        inputs: The prefix of ``(args, kwargs)``.
        outputs: The prefix of the output.
        axis_metadata: What is told to Variables whose axis the transform takes away
            inside: the ``transform_metadata`` of the public functions.
        returns_captured: Whether objects of an outer trace may be returned, as copies.
    """

    name: str
    mode: Propagation
    inputs: Assignment
    outputs: Assignment
    axis_metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    returns_captured: bool = False


class _Places(NamedTuple):
    """The static part of what leaves a trace, and the group of each leaf."""

    returned: Returned
    changed: tuple[int, ...]
    structure: tuple[int, ...]
    out: tuple[int, ...]


jax.tree_util.register_static(_Places)


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
    inner = transform(_interior(f, row), ins, (None, ins, ins, outs))

    @decorators.wraps(f)
    def lifted(*args: Any, **kwargs: Any) -> Any:
        if row.mode.structure:
            args, kwargs = decorators.to_positions(f, args, kwargs), {}
        packed = packing.pack((args, kwargs), row.mode, row.name)
        roles = row.inputs.assign(packed.skeleton, packed.leaves)
        places, *groups = inner(*packing.part(packed, roles, len(ins)))
        listed = [
            _in_order(group, numbers)
            for group, numbers in zip(groups, places[1:], strict=True)
        ]
        changed = [named.value for named in listed[0]]
        return boundary.commit(packed, places.returned, changed, *listed[1:])

    return lifted


def _interior(f: Callable[..., Any], row: Row) -> Callable[..., Any]:
    @decorators.wraps(f)
    def traced(*groups: Values) -> Any:
        skeleton, values = packing.join(groups)
        crossing = Crossing(
            skeleton,
            values,
            row.mode,
            row.name,
            returns_captured=row.returns_captured,
        )
        roles = _roles_of(groups, len(values))
        args, kwargs = crossing.tree
        with _AxisNames(row, crossing, roles) as names:
            out = f(*args, **kwargs)
            names.add_to_output(out)
        return _leave(row, crossing, roles, out)

    del traced.__wrapped__
    return traced


def _roles_of(groups: Sequence[Values], count: int) -> list[int]:
    roles = [0] * count
    for number, group in enumerate(groups):
        for position in group.positions or ():
            roles[position] = number
    return roles


def _leave(row: Row, crossing: Crossing, roles: Sequence[int], out: Any) -> Any:
    """Collects, and puts every leaf into its group."""
    found = crossing.collect(out)
    _check_consistent(row, crossing, out)
    returned = found.returned
    changed = [roles[position] for position in returned.changed]
    structure: list[int] = []
    if returned.structure is not None:
        structure = row.inputs.assign(returned.structure, found.structure.objects)
        structure = list(itertools.compress(structure, found.structure.is_new))
    assigned = row.outputs.assign(returned.out, found.out.objects)
    out_numbers = list(itertools.compress(assigned, found.out.is_new))
    ins, outs = len(row.inputs.values), len(row.outputs.values)
    names = crossing.skeleton.names()
    return (
        _Places(returned, tuple(changed), tuple(structure), tuple(out_numbers)),
        _in_groups(
            map(_Named, [names[i] for i in returned.changed], found.changed),
            changed,
            ins,
        ),
        _in_groups(found.structure.values(), structure, ins),
        _in_groups(found.out.values(), out_numbers, outs),
    )


class _Named(NamedTuple):
    """A value with its name, so that JAX's messages about outputs name it."""

    name: str
    value: Any

    def key(self) -> _Key:
        """The path entry, with attributes in quotes: ``args[0]['kernel']``."""
        return _Key(re.sub(r"\.(\w+)", r"['\1']", self.name))


class _Key(str):
    """A path entry that JAX prints as it is."""


jax.tree_util.register_pytree_with_keys(
    _Named,
    lambda named: (((named.key(), named.value),), named.name),
    lambda name, children: _Named(name, children[0]),
)


def _check_consistent(row: Row, crossing: Crossing, out: Any) -> None:
    if len({*row.inputs.values, *row.outputs.values}) == 1 or not row.mode.sharing:
        return
    occurrences = [
        (path[1:], leaf, prefix)
        for path, leaf, prefix in row.inputs.occurrences(crossing.tree, True)
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


def _in_order(groups: Sequence[Sequence[Any]], numbers: Sequence[int]) -> list[Any]:
    iterators = [iter(group) for group in groups]
    return [next(iterators[number]) for number in numbers]


class _AxisNames:
    """Inside, Variables don't have the mapped axis; so their annotations must not.

    On entry the name is taken out of the metadata of the mapped arguments; on exit it
    is put back, and into that of the Variables in the output.
    """

    def __init__(self, row: Row, crossing: Crossing, roles: Sequence[int]) -> None:
        self._row = row
        self._mapped: list[tuple[Variable[Any], int]] = []
        if not row.axis_metadata:
            return
        definitions = crossing.skeleton.definitions()
        for definition, role in zip(definitions, roles, strict=True):
            axis = row.inputs.values[role]
            if definition is not None and isinstance(axis, int):
                variable = crossing.objects[definition.index]
                if isinstance(variable, Variable):
                    self._mapped.append((variable, axis))

    def __enter__(self) -> _AxisNames:
        for variable, axis in self._mapped:
            partitioning.remove_axis(variable, axis, self._row.axis_metadata)
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:
            for variable, axis in self._mapped:
                partitioning.add_axis(variable, axis, self._row.axis_metadata)

    def add_to_output(self, out: Any) -> None:
        """Puts the name into the metadata of new Variables in the output."""
        if not self._row.axis_metadata:
            return
        arguments = {id(variable) for variable, _ in self._mapped}
        sharing = self._row.mode.sharing
        done: set[int] = set()
        for _, leaf, axis in self._row.outputs.occurrences(out, sharing):
            is_new = isinstance(leaf, Variable) and id(leaf) not in arguments | done
            if is_new and isinstance(axis, int):
                done.add(id(leaf))
                partitioning.add_axis(leaf, axis, self._row.axis_metadata)
