"""Where arrays go: each device gets its part, and nothing is ever whole on the host."""

from __future__ import annotations

import abc
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from graftree import _jax, errors
from graftree.annotations import Path
from graftree.core import paths, walks
from graftree.core.graph import flattening, nodes
from graftree.core.variables import partitioning, variables
from graftree.core.variables.variables import Variable
from graftree.weights.layouts import Index
from graftree.weights.tables import Array


class Reader(abc.ABC):
    """Reads pieces of one array."""

    @abc.abstractmethod
    def read(self, index: Index) -> np.ndarray:
        """Reads a piece; it may be a view, with its axes in another order in memory."""

    @abc.abstractmethod
    def run_bytes(self, index: Index) -> int:
        """How many bytes of a piece follow each other where it is read from."""


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
                        where="\n".join(map(paths.dotted, lacking[:12])),
                        way_out="Pass nnx.get_named_sharding(nnx.state(model), mesh), "
                        "or one sharding for all.",
                    )
                )
        self._targets = {
            array.path: given[array.path] if given else shardings or _target(array)
            for array in arrays
        }

    def put(self, array: Array, dtype: Any, reader: Reader) -> Any:
        """Makes an array of what is read, where it belongs."""
        shape = tuple(array.value.shape)
        if isinstance(array.value, (np.ndarray, np.generic)):
            return reader.read(_whole(shape))
        target = self._targets[array.path]
        if target is None:
            return jax.device_put(reader.read(_whole(shape)))
        return _sharded(shape, dtype, target, reader)


def _by_path(tree: Any) -> dict[Path, Sharding]:
    """The shardings in a tree like the state of a model, or in an object."""

    def below(x: Any, _: Path) -> list[tuple[Any, Any]]:
        return [child[:2] for child in nodes.children(flattening.raw_of(x))]

    found = [(path, flattening.raw_of(x)) for path, x in walks.walk(tree, below)]
    return {path: x for path, x in found if isinstance(x, Sharding)}


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
                where=f"{paths.dotted(array.path)}: {metadata['out_sharding']}",
                way_out="Load within jax.set_mesh(mesh), or pass shardings=.",
            )
        )
    return partitioning.on_concrete_mesh(held.sharding, array.path, "nnx.weights.load")


def _whole(shape: Sequence[int]) -> Index:
    return tuple(slice(0, size) for size in shape)


def _sharded(shape: Any, dtype: Any, target: Sharding, reader: Reader) -> jax.Array:
    """An array whose parts are read once each, also if several devices have them."""
    holders: dict[Piece, list[Any]] = {}
    for device, index in target.addressable_devices_indices_map(shape).items():
        assert index is not None
        piece = tuple(
            part.indices(size)[:2] for part, size in zip(index, shape, strict=True)
        )
        holders.setdefault(piece, []).append(device)
    parts = []
    for piece, part in _read(list(holders), reader):
        # JAX transposes, which would take NumPy ten times as long.
        parts += [jax.device_put(part, device) for device in holders[piece]]
    return jax.make_array_from_single_device_arrays(shape, target, parts, dtype=dtype)


# Where a piece starts and stops, along each axis.
Piece = tuple[tuple[int, int], ...]

# Shorter runs of bytes are not worth a call of the system each.
_SHORT = 2**16


def _read(
    pieces: Sequence[Piece], reader: Reader
) -> Iterator[tuple[Piece, np.ndarray]]:
    """Reads each piece; in one go if they are many short runs of what is read whole."""
    box = tuple(
        (min(start for start, _ in along), max(stop for _, stop in along))
        for along in zip(*pieces, strict=True)
    )
    is_whole = _volume(box) == sum(map(_volume, pieces))
    if len(pieces) > 1 and is_whole and reader.run_bytes(_index(pieces[0])) < _SHORT:
        whole = reader.read(_index(box))
        for piece in pieces:
            inside = [
                slice(start - first, stop - first)
                for (start, stop), (first, _) in zip(piece, box, strict=True)
            ]
            part = whole[tuple(inside)]
            # JAX may keep what it need not transpose, and with a view it is the whole.
            yield piece, part.copy() if part.flags.c_contiguous else part
    else:
        for piece in pieces:
            yield piece, reader.read(_index(piece))


def _index(piece: Piece) -> Index:
    return tuple(slice(start, stop) for start, stop in piece)


def _volume(piece: Piece) -> int:
    return math.prod(stop - start for start, stop in piece)
