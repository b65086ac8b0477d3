"""Large arrays that a step makes, and that its devices don't divide.

The program before XLA divides it has the shapes of whole arrays, the compiled one those
of the parts that a device has, and an operation has the same name in both. So the sizes
of its array in the two say into how many parts it is divided.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from graftree.forecast import costs, hlo, scopes
from graftree.forecast.forecasts import Activation
from graftree.forecast.hlo import ArrayType, Instruction, Program
from graftree.sharding.placement import PlacedArray

_INNER = re.compile(r".*\b(?:jit\([^()]*\)|closed_call|rematted_computation)/")
_SHARE = 100  # an array is large if it is that part of what is made


def arrays(
    text: str,
    program: Program,
    mesh: Mapping[str, int],
    parameters: Sequence[PlacedArray],
    total: int,
) -> list[Activation]:
    """Lists large arrays that are not divided, or may not be, largest first.

    Arrays with the shape of a parameter, or of a layer of a stacked one, are left out:
    FSDP gathers parameters, and sums their gradients.

    Args:
        text: The program before XLA divides it, with the names of operations.
        program: The program of one device.
        mesh: The size of each axis of the mesh.
        parameters: Those in the arguments.
        total: Bytes of what the program makes, results and temporaries. An array is
            large if it has a hundredth of that.
    """
    whole_by_name = _whole_arrays(text)
    shapes = {
        _unordered(shape[start:])
        for row in parameters
        for shape in (row.shape, row.local_shape)
        for start in (0, 1)
    }
    groups = collections.defaultdict[object, list[Activation]](list)
    for name, path, array in _large_arrays(program, total / _SHARE):
        # Within a function that is called, names start over.
        candidates = whole_by_name.get(name) or whole_by_name.get(_INNER.sub("", name))
        row = _row(name, path, array, candidates or (), mesh)
        if row is not None and _unordered(row.shape) not in shapes:
            groups[row.path, row.shape, row.way_out].append(row)
    rows = [
        dataclasses.replace(max(group, key=lambda row: row.num_bytes), count=len(group))
        for group in groups.values()
    ]
    return sorted(rows, key=lambda row: -row.num_bytes)


def _whole_arrays(text: str) -> Mapping[str, list[ArrayType]]:
    """Lists the arrays of each name, before they are divided."""
    arrays = collections.defaultdict[str, list[ArrayType]](list)
    for instruction in hlo.instructions(text):
        name = instruction.op_name
        # In a function that `jax.shard_map` maps, arrays are parts already.
        if name and "shard_map" not in name:
            arrays[name] += instruction.arrays
    return arrays


def _large_arrays(
    program: Program, num_bytes: float
) -> Iterator[tuple[str, str, ArrayType]]:
    """Lists arrays in memory that are as large, with their operation and module."""
    for computation, _ in program.runs():
        scope_by_name = scopes.scopes_of(computation)
        for instruction in computation.values():
            if not costs.is_kernel(instruction):
                continue
            for name, array in _named(program, instruction):
                if array.is_in_memory and array.num_bytes >= num_bytes > 0:
                    scope = scope_by_name[instruction.name]
                    path = scopes.scope_of(name).path or scope.path
                    yield name, ".".join(path), array


def _named(
    program: Program, instruction: Instruction
) -> Iterator[tuple[str, ArrayType]]:
    """Names the operation of each array that an instruction returns."""
    names = [instruction.op_name] * len(instruction.arrays)
    if instruction.opcode == "fusion":
        results = program.results(instruction)
        if len(results) == len(names):
            names = [x.op_name or instruction.op_name for x in results]
    return zip(names, instruction.arrays, strict=True)


def _row(
    name: str,
    path: str,
    array: ArrayType,
    candidates: Sequence[ArrayType],
    mesh: Mapping[str, int],
) -> Activation | None:
    """Describes an array, unless it is divided, or can't be.

    Args:
        name: The operation that makes it.
        path: The module.
        array: What a device has of it.
        candidates: Whole arrays of that name, of which it may be a part.
        mesh: The size of each axis of the mesh.
    """
    num_devices = math.prod(mesh.values())
    sizes = {x.size for x in candidates}
    num_parts = {
        count
        for count in range(1, num_devices + 1)
        if num_devices % count == 0 and count * array.size in sizes
    }
    if num_parts and 1 not in num_parts:
        return None
    shape, way_out = array.shape, None
    if num_parts == {1}:
        shape = next(x.shape for x in candidates if x.size == array.size)
        way_out = _way_out(shape, mesh)
        if way_out is None:
            return None
    operation = name.partition(";")[0].rpartition("/")[2]
    return Activation(path, operation, array.dtype, shape, array.num_bytes, 1, way_out)


def _way_out(shape: Sequence[int], mesh: Mapping[str, int]) -> tuple[str, int] | None:
    """Finds an axis of the mesh, the longest, and the first of an array to divide."""
    for name, size in sorted(mesh.items(), key=lambda item: -item[1]):
        for axis, length in enumerate(shape):
            if size > 1 and length % size == 0:
                return name, axis
    return None


def _unordered(shape: Sequence[int]) -> tuple[int, ...]:
    """Sorts the sizes of a shape: compilers transpose, and add axes of size 1."""
    return tuple(sorted(size for size in shape if size > 1))
