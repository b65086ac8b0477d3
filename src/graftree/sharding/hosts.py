"""Arrays of many processes: made of what each process has, and read by each."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from graftree import errors
from graftree.core import paths
from graftree.core.states import pure_dicts
from graftree.sharding import misfits


def global_batch(batch: Any, sharding: jax.sharding.Sharding) -> Any:
    """Makes arrays of all processes of the rows that each process has.

    Args:
        batch: A pytree of NumPy arrays, or what converts to them, or of random keys:
            the rows of this process. All processes have the same number of rows.
        sharding: Where the rows go, e.g. ``NamedSharding(mesh, P("data"))``.

    Returns:
        A pytree of arrays whose first axis has the rows of all processes. With a single
        process these are its rows.

    Raises:
        ValueError: If an axis of an array can't be divided among the devices, or it has
            no such axis, or no numbers; it lists all of these by path.

    Example:
        >>> mesh = jax.make_mesh((4,), ("data",))
        >>> sharding = jax.NamedSharding(mesh, jax.P("data"))
        >>> batch = nnx.sharding.global_batch({"x": np.zeros((8, 3))}, sharding)
        >>> batch["x"].sharding.shard_shape(batch["x"].shape)
        (2, 3)
    """
    listed, treedef = jax.tree.flatten_with_path(batch)
    problems = [
        f"{paths.dotted(paths.from_jax(path), 'the batch')} {problem}"
        for path, leaf in listed
        if (problem := _problem(leaf, sharding)) is not None
    ]
    if problems:
        raise ValueError(
            errors.message(
                "nnx.sharding.global_batch: not all of it can be divided.",
                where="\n".join(problems[:12]),
                way_out="Leave out or pad the last rows; give what has other axes a "
                "call with a sharding of its own.",
            )
        )
    return treedef.unflatten([_placed(leaf, sharding) for _, leaf in listed])


def _placed(leaf: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    if not _is_key(leaf):
        return jax.make_array_from_process_local_data(sharding, np.asarray(leaf))
    data = np.asarray(jax.random.key_data(leaf))
    placed = jax.make_array_from_process_local_data(sharding, data)
    return jax.random.wrap_key_data(placed, impl=jax.random.key_impl(leaf))


def _is_key(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _problem(leaf: Any, sharding: jax.sharding.Sharding) -> str | None:
    """Why a leaf has no place, or can't be divided, if so."""
    if not _is_key(leaf):
        leaf = np.asarray(leaf)
        if not (jnp.issubdtype(leaf.dtype, np.number) or leaf.dtype == np.bool_):
            return f"has the dtype {leaf.dtype}: it is no array of numbers"
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    spec = sharding.spec
    if len(spec) > leaf.ndim:
        return f"has the shape {leaf.shape}, and the sharding is for {len(spec)} axes"
    for number, entry in enumerate(spec):
        axes = misfits.axes_of(entry)
        parts = math.prod(sharding.mesh.shape[axis] for axis in axes)
        of_process = _own_parts(sharding.mesh, entry, parts) if axes else 1
        size = leaf.shape[number]
        if size % of_process:
            what = (
                f"{size} rows" if number == 0 else f"the size {size} of axis {number}"
            )
            return (
                f"has {what} in this process, no multiple of its {of_process} parts of "
                f"the axis {', '.join(axes)} of the mesh"
            )
    return None


def _own_parts(mesh: Any, entry: Any, parts: int) -> int:
    """In how many of its parts an axis is on devices of this process."""
    one_each = NamedSharding(mesh, PartitionSpec(entry))
    where: Any = one_each.addressable_devices_indices_map((parts,))
    return len({rows.indices(parts) for (rows,) in where.values()})


def fetch(tree: Any) -> Any:
    """Reads arrays that are spread over processes, in each of them.

    All processes must call it, with the same tree: what one process lacks, the others
    send. A metric that was computed of a global batch is read like that.

    Args:
        tree: A pytree of arrays and Variables; also an object.

    Returns:
        The same tree with NumPy arrays, the whole of each. Random keys stay keys, and
        what is no number, such as a string, stays what it is.

    Example:
        >>> metric = nnx.metrics.Average()
        >>> metric.update(values=jnp.arange(4.0))
        >>> nnx.sharding.fetch(metric.compute()).item()
        1.5
    """
    pure = pure_dicts.as_pure(tree)
    return jax.tree.map(_read, pure)


def _read(x: Any) -> Any:
    if _is_key(x):
        if x.is_fully_addressable:
            return x
        data = _read(jax.random.key_data(x))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        if x.is_fully_replicated:
            return np.asarray(x.addressable_data(0))
        # Here, because most programs have one process.
        from jax.experimental import multihost_utils

        return multihost_utils.process_allgather(x, tiled=True)
    is_number = isinstance(x, (jax.Array, np.ndarray, np.generic, int, float, complex))
    return np.asarray(x) if is_number else x
