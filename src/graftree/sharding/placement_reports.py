"""Where the arrays of a model are: a table by path, with the bytes on each device."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

from graftree.core import paths
from graftree.core.graph import watches
from graftree.core.graph.flattening import raw_of
from graftree.core.text import short_forms


@dataclasses.dataclass(frozen=True)
class PlacedArray:
    """An array.

    Attributes:
        path: Where it is, as in ``blocks[3].mlp.kernel``.
        dtype: Its dtype.
        shape: Its shape.
        local_shape: The shape of the part that a device holds.
        spec: The axes of the mesh that divide its axes.
        num_bytes: The size of the array.
        local_bytes: The size of the part that a device holds.
        array: The array itself, or a ``jax.ShapeDtypeStruct``.
    """

    path: str
    dtype: Any
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    spec: Any
    num_bytes: int
    local_bytes: int
    array: Any = dataclasses.field(repr=False)


class Report:
    """What `report` found; prints as a table.

    Attributes:
        rows: A `PlacedArray` for each array.
        num_bytes: The size of all arrays.
        bytes_per_device: The most that a device holds of them.

    Example:
        >>> report = nnx.sharding.report(nnx.Linear(2, 4, rngs=nnx.Rngs(0)))
        >>> report.rows[1].path, report.rows[1].local_shape, report.num_bytes
        ('kernel', (2, 4), 48)
    """

    def __init__(self, rows: Sequence[PlacedArray]) -> None:
        self.rows = tuple(rows)
        self.num_bytes = sum(row.num_bytes for row in rows)
        self.bytes_per_device = _fullest(rows)

    def __str__(self) -> str:
        lines = [("path", "global", "local", "spec", "bytes", "bytes per device")]
        lines += [
            (
                row.path,
                short_forms.describe_form(row.dtype, row.shape),
                short_forms.describe_form(row.dtype, row.local_shape),
                _in_words(row.spec),
                f"{row.num_bytes:,}",
                f"{row.local_bytes:,}",
            )
            for row in self.rows
        ]
        total = f"{self.num_bytes:,}", f"{self.bytes_per_device:,}"
        return "\n".join(short_forms.aligned([*lines, ("total", "", "", "", *total)]))

    __repr__ = __str__

    def draw(self, path: str) -> None:
        """Draws where the parts of an array are; needs ``rich``.

        Args:
            path: The path of an array of one or two axes, as in the table.

        Raises:
            KeyError: If there is no array at the path.

        Example:
            >>> mesh = jax.make_mesh((2,), ("a",))
            >>> make = lambda: nnx.Param(jnp.ones((4, 4)), out_sharding=("a",))
            >>> report = nnx.sharding.report({"x": nnx.sharding.init(make, mesh)})
            >>> report.draw("x")  # doctest: +SKIP
        """
        found = {row.path: row.array for row in self.rows}
        if path not in found:
            raise KeyError(f"There is no array at {path!r}: {', '.join(found)}.")
        jax.debug.visualize_array_sharding(found[path])


def _fullest(rows: Sequence[PlacedArray]) -> int:
    """The bytes on the device that holds most; arrays without a place are on all."""
    held = collections.Counter[Any]()
    everywhere = 0
    for row in rows:
        sharding = getattr(row.array, "sharding", None)
        if sharding is None:
            everywhere += row.local_bytes
        for device in getattr(sharding, "device_set", ()):
            held[device] += row.local_bytes
    return everywhere + max(held.values(), default=0)


def report(tree: Any) -> Report:
    """Says where the arrays of an object are, and how many bytes each device holds.

    Args:
        tree: An object, also an abstract one; a State; a pytree of these. A repeated
            array counts once.

    Returns:
        A `Report`, which prints as a table.

    Example:
        >>> mesh = jax.make_mesh((4,), ("model",))
        >>> def make():
        ...     metadata = {"out_sharding": (None, "model")}
        ...     return nnx.Linear(2, 8, kernel_metadata=metadata, rngs=nnx.Rngs(0))
        >>> nnx.sharding.report(nnx.sharding.init(make, mesh))
        path    global        local         spec             bytes  bytes per device
        bias    float32[8]    float32[8]    (replicated)        32                32
        kernel  float32[2,8]  float32[2,2]  (None, 'model')     64                16
        total                                                   96                48
    """
    skeleton, leaves = watches.flatten_node(tree, None, "report")
    found: dict[int, PlacedArray] = {}
    for path, leaf in zip(skeleton.paths(), leaves, strict=True):
        for below, array in jax.tree_util.tree_leaves_with_path(raw_of(leaf)):
            if hasattr(array, "shape") and hasattr(array, "dtype"):
                found.setdefault(id(array), _placed_array((*path, *below), array))
    return Report([*found.values()])


def _placed_array(path: tuple[Any, ...], array: Any) -> PlacedArray:
    sharding = getattr(array, "sharding", None)
    local = array.shape if sharding is None else sharding.shard_shape(array.shape)
    size = array.dtype.itemsize
    return PlacedArray(
        paths.dotted(path),
        array.dtype,
        array.shape,
        local,
        getattr(sharding, "spec", None),
        math.prod(array.shape) * size,
        math.prod(local) * size,
        array,
    )


def _in_words(spec: Any) -> str:
    """The axes that divide an array."""
    is_divided = any(entry is not None for entry in spec or ())
    return f"({', '.join(map(repr, spec))})" if is_divided else "(replicated)"
