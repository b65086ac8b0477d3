"""Names, shapes and a mesh that don't go together, in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from graftree.core.variables import sharding


def axes_of(entry: Any) -> tuple[str, ...]:
    """The axes of the mesh that divide an axis of an array."""
    axes = entry if isinstance(entry, tuple) else (entry,)
    return tuple(axis for axis in axes if isinstance(axis, str))


def between(
    names: Sequence[Any], spec: PartitionSpec, shape: tuple[int, ...], mesh: Any
) -> str | None:
    """What is wrong if an array has axes of these names; ``None`` if nothing is.

    Args:
        names: An annotation.
        spec: What its names mean.
        shape: The shape of the array.
        mesh: The mesh.
    """
    taken: dict[str, Any] = {}
    for name, entry in zip(names, spec, strict=True):
        for axis in axes_of(entry):
            if axis not in mesh.axis_names:
                return f"{name!r} means {axis!r}, no axis of the mesh"
            if axis in taken:
                return f"{taken[axis]!r} and {name!r} both stand for the axis {axis!r}"
            taken[axis] = name
    if len(names) > len(shape):
        return f"{len(names)} names {tuple(names)} for the shape {shape}"
    for number, entry in enumerate(spec):
        parts = math.prod(mesh.shape[axis] for axis in axes_of(entry))
        if shape[number] % parts:
            axes = ", ".join(axes_of(entry))
            return (
                f"axis {number} ({names[number]!r}) has the size {shape[number]}, "
                f"which {parts} devices can't divide (axis {axes} of the mesh)"
            )
    return None


def surroundings(mesh: Any) -> str:
    """Lines that say what names can mean."""
    rules = ", ".join(f"{a!r} -> {b!r}" for a, b in sharding.get_logical_axis_rules())
    axes = ", ".join(f"{name!r} of {size}" for name, size in mesh.shape.items())
    return f"axes of the mesh: {axes}\nrules in force: {rules or 'none'}"


WAY_OUT = (
    "Give each name an axis of the mesh of its own, or None, by rules "
    "[(name, axis), ...];\na size that can't be divided needs None, or another mesh."
)
