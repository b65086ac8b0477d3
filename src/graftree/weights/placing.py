"""Where arrays go: each device gets its part, and nothing is ever whole on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from graftree import _jax, errors
from graftree.annotations import Path
from graftree.core import patterns
from graftree.core.graph import nodes
from graftree.core.variables import partitioning, variables
from graftree.core.variables.variables import Variable
from graftree.weights.layouts import Index
from graftree.weights.tables import Array

Read = Callable[[Index], np.ndarray]


class Places:
    """Where each array goes.

    Args:
        shardings: As for `load`.
        arrays: All arrays that are loaded.

    Raises:
        ValueError: If ``shardings`` lacks one of the arrays, or an abstract array is
            annotated and there is no mesh.
    """

    def __init__(self, shardings: Any, arrays: Sequence[Array]) -> None:
        given = None
        if shardings is not None and not isinstance(shardings, Sharding):
            given = _by_path(shardings)
            lacking = [a.path for a in arrays if a.path not in given]
            if lacking:
                raise ValueError(
                    errors.message(
                        "shardings= of nnx.weights.load lacks arrays of the model.",
                        where="\n".join(map(patterns.dotted, lacking[:12])),
                        way_out="Pass nnx.get_named_sharding(nnx.state(model), mesh), "
                        "or one sharding for all.",
                    )
                )
        self._targets = {
            array.path: given[array.path] if given else shardings or _target(array)
            for array in arrays
        }

    def put(self, array: Array, dtype: Any, read: Read) -> Any:
        """Makes an array of what ``read`` gives, where it belongs."""
        shape = tuple(array.value.shape)
        if isinstance(array.value, (np.ndarray, np.generic)):
            return read(_whole(shape))
        target = self._targets[array.path]
        if target is None:
            return jnp.asarray(read(_whole(shape)))
        return _sharded(shape, dtype, target, read)


def _by_path(tree: Any, path: Path = ()) -> dict[Path, Sharding]:
    """The shardings in a tree like the state of a model, or in an object."""
    if isinstance(tree, Variable):
        tree = tree.get_raw_value()
    if isinstance(tree, Sharding):
        return {path: tree}
    found: dict[Path, Sharding] = {}
    for key, value, _ in nodes.children(tree):
        found.update(_by_path(value, (*path, key)))
    return found


def _target(array: Array) -> Sharding | None:
    """Where an array of a model is, or should be; ``None`` if it may be anywhere."""
    held = array.value
    if isinstance(held, _jax.Tracer):
        return None
    if isinstance(held, jax.Array):
        return held.sharding if held.committed else None
    if not isinstance(held, jax.ShapeDtypeStruct):
        return None
    metadata = {}
    if isinstance(array.leaf, Variable):
        metadata = variables.metadata_of(array.leaf)
    held = partitioning.place_abstract(held, metadata)
    if held.sharding is None and metadata.get("out_sharding"):
        raise ValueError(
            errors.message(
                "nnx.weights.load: an abstract array is annotated with a sharding, and "
                "there is no mesh.",
                where=f"{patterns.dotted(array.path)}: {metadata['out_sharding']}",
                way_out="Load within jax.set_mesh(mesh), or pass shardings=.",
            )
        )
    return partitioning.on_concrete_mesh(held.sharding, array.path, "nnx.weights.load")


def _whole(shape: Sequence[int]) -> Index:
    return tuple(slice(0, size) for size in shape)


def _sharded(shape: Any, dtype: Any, target: Sharding, read: Read) -> jax.Array:
    """An array whose parts are read once each, also if several devices have them."""
    holders: dict[Any, list[Any]] = {}
    for device, index in target.addressable_devices_indices_map(shape).items():
        assert index is not None
        pieces = tuple(
            piece.indices(size)[:2] for piece, size in zip(index, shape, strict=True)
        )
        holders.setdefault(pieces, []).append(device)
    parts = []
    for pieces, devices in holders.items():
        # In order, and a scalar stays one, unlike with `np.ascontiguousarray`.
        part = np.asarray(read(tuple(slice(*piece) for piece in pieces)), order="C")
        parts += [jax.device_put(part, device) for device in devices]
    return jax.make_array_from_single_device_arrays(shape, target, parts, dtype=dtype)
