"""Weights of a model into a file: all of them, under the names of a table."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from graftree import errors
from graftree.core import patterns
from graftree.sharding import hosts
from graftree.weights import tables, writing
from graftree.weights.tables import Array, Tensor


def save(
    path: Any,
    model: Any,
    mapping: Any,
    *,
    shard_bytes: int | None = None,
    metadata: Mapping[str, str] | None = None,
    missing: Any = None,
) -> None:
    """Writes the weights of a model to a file, or to several.

    What `load` reads with the same table comes back bit by bit, names, shapes and
    dtypes included. The file is written beside its place first, so that it is whole
    when it is there. Of several processes all must call it, and the first one writes.

    Args:
        path: A file; it is replaced. With ``shard_bytes`` a folder.
        model: The model.
        mapping: An `nnx.weights.Mapping`, or a dict of its lines.
        shard_bytes: The most bytes of tensors in a file. The folder gets as many files
            as are needed, and an index, named as by Hugging Face; if one is enough, one
            file ``model.safetensors``. ``None``: one file.
        metadata: Strings that are written in front; ``None``: ``{"format": "pt"}``,
            which readers of Hugging Face ask for.
        missing: Which arrays of the model are not written: a pattern of paths, a class,
            a function of path and leaf, or a list of these. Random streams, caches and
            Intermediates never are.

    Raises:
        ValueError: If the mapping does not fit the model, or leaves out arrays of it;
            or if the model is abstract.

    Example:
        >>> import pathlib, tempfile
        >>> model = nnx.Dict(up=nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder) / "model.safetensors"
        ...     nnx.weights.save(path, model, {"fc": "up"})
        ...     again = nnx.weights.load(path, nnx.clone(model), {"fc": "up"})
        >>> jnp.array_equal(again.up.kernel, model.up.kernel)
        Array(True, dtype=bool)
    """
    mapping = tables.as_mapping(mapping)
    tensors = mapping.tensors(model)
    _check(model, tensors, missing)
    write(
        path,
        tensors,
        shard_bytes=shard_bytes,
        metadata={"format": "pt"} if metadata is None else metadata,
    )


def write(
    path: Any,
    tensors: Sequence[Tensor],
    *,
    shard_bytes: int | None = None,
    metadata: Mapping[str, str],
) -> None:
    """Writes tensors of a model; of several processes the first one does it."""
    outs = [*map(out_of, tensors)]
    if jax.process_count() == 1:
        writing.write(path, outs, shard_bytes=shard_bytes, metadata=metadata)
    else:
        _by_the_first(path, outs, shard_bytes, metadata)


def out_of(tensor: Tensor) -> writing.Out:
    """A tensor of a model, to be written."""
    dtype = np.dtype(tensor.arrays[0].value.dtype)
    make = functools.partial(_values, tensor)
    return writing.Out(tensor.name, dtype, tensor.solved.file_shape, make)


def _by_the_first(
    path: Any,
    outs: Sequence[Any],
    shard_bytes: int | None,
    metadata: Mapping[str, str],
) -> None:
    """Lets the first process write, while the others send what it lacks."""
    from jax.experimental import multihost_utils

    pending = {out.name: out for out in writing.in_order(outs, shard_bytes)}

    def make(name: str) -> np.ndarray:
        return pending.pop(name).make()

    try:
        if jax.process_index() == 0:
            watched = [
                dataclasses.replace(out, make=functools.partial(make, out.name))
                for out in outs
            ]
            writing.write(path, watched, shard_bytes=shard_bytes, metadata=metadata)
    finally:
        # Also after an error: the others wait for what all of them must do.
        for name in [*pending]:
            make(name)
        multihost_utils.sync_global_devices("nnx.weights.save")


def _values(tensor: Tensor) -> np.ndarray:
    """The tensor as it is in the file."""
    parts = [_layer(array, tensor.at) for array in tensor.arrays]
    return tensor.solved.to_file(parts)


def _layer(array: Array, at: tuple[int, ...]) -> np.ndarray:
    return np.asarray(hosts.fetch(array.value[at] if at else array.value))


def _check(model: Any, tensors: Sequence[Tensor], missing: Any) -> None:
    """Raises unless all arrays that should be written can be."""
    may_miss = (
        (lambda path, leaf: False)
        if missing is None
        else patterns.to_predicate(missing)
    )
    written = {array.path for tensor in tensors for array in tensor.arrays}
    left_out = [
        array
        for array in tables.arrays_of(model).values()
        if array.path not in written
        and not tables.is_transient(array.leaf)
        and not may_miss(array.path, array.leaf)
    ]
    if left_out:
        raise ValueError(
            errors.message(
                "nnx.weights.save: the mapping leaves out arrays of the model. Nothing "
                "was written.",
                where="\n".join(map(tables.describe, left_out[:12])),
                way_out="Give them lines, or name them in missing=.",
            )
        )
    for tensor in tensors:
        kinds = {np.dtype(array.value.dtype) for array in tensor.arrays}
        abstract = [
            a for a in tensor.arrays if isinstance(a.value, jax.ShapeDtypeStruct)
        ]
        if len(kinds) > 1 or abstract:
            raise ValueError(
                errors.message(
                    f"nnx.weights.save: {tensor.name!r} can't be written. Nothing was.",
                    where="\n".join(map(tables.describe, tensor.arrays)),
                    way_out="The arrays of a tensor have one dtype."
                    if len(kinds) > 1
                    else "The model is abstract: it has no values.",
                )
            )
