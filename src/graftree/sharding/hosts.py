"""Arrays of many processes: made of what each process has, and read by each."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from graftree import errors
from graftree.core import paths, patterns
from graftree.core.states import pure_dicts
from graftree.sharding import misfits


def global_batch(batch: Any, sharding: jax.sharding.Sharding) -> Any:
    """Makes arrays of all processes of the rows that each process has.

    Args:
        batch: A pytree of NumPy arrays, or what converts to them: the rows of this
            process. All processes have the same number of rows.
        sharding: Where the rows go, e.g. ``NamedSharding(mesh, P("data"))``.

    Returns:
        A pytree of arrays whose first axis has the rows of all processes. With a single
        process these are its rows.

    Raises:
        ValueError: If the rows of an array can't be divided among the devices.

    Example:
        >>> mesh = jax.make_mesh((4,), ("data",))
        >>> sharding = jax.NamedSharding(mesh, jax.P("data"))
        >>> batch = nnx.sharding.global_batch({"x": np.zeros((8, 3))}, sharding)
        >>> batch["x"].sharding.shard_shape(batch["x"].shape)
        (2, 3)
    """
    rows = jax.tree.map(np.asarray, batch)
    for path, x in jax.tree.leaves_with_path(rows):
        _check_rows(patterns.dotted(paths.from_jax(path), "the batch"), x, sharding)
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(sharding, x), rows
    )


def _check_rows(name: str, x: np.ndarray, sharding: jax.sharding.Sharding) -> None:
    """Raises if an array has no rows, or they can't be divided."""
    if not isinstance(sharding, jax.sharding.NamedSharding) or not sharding.spec:
        return
    axes = misfits.axes_of(sharding.spec[0])
    parts = math.prod(sharding.mesh.shape[axis] for axis in axes)
    of_process = _own_parts(sharding.mesh, sharding.spec[0], parts)
    problem = ""
    if len(sharding.spec) > x.ndim:
        problem = f"has the shape {x.shape}, the sharding is {sharding.spec}"
    elif len(x) % of_process:
        problem = (
            f"has {len(x)} rows in this process, which its {of_process} parts of the "
            f"axis {', '.join(axes)} of the mesh can't divide"
        )
    if problem:
        raise ValueError(
            errors.message(
                f"nnx.sharding.global_batch: {name} {problem}.",
                way_out=f"Give rows in a multiple of {of_process}, and leave out or "
                "pad the last ones.",
            )
        )


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
        The same tree with NumPy arrays, the whole of each; random keys stay keys.

    Example:
        >>> metric = nnx.metrics.Average()
        >>> metric.update(values=jnp.arange(4.0))
        >>> nnx.sharding.fetch(metric.compute()).item()
        1.5
    """
    pure = pure_dicts.as_pure(tree)
    return jax.tree.map(_read, pure)


def _read(x: Any) -> Any:
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        whole = x
    elif x.is_fully_replicated:
        whole = x.addressable_data(0)
    else:
        # Here, because most programs have one process.
        from jax.experimental import multihost_utils

        return multihost_utils.process_allgather(x, tiled=True)
    is_key = jnp.issubdtype(jnp.result_type(whole), jax.dtypes.prng_key)
    return whole if is_key else np.asarray(whole)
