"""Arrays of many processes: made of what each process has, and read by each."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from graftree.core.states import pure_dicts


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
        ValueError: If the rows can't be divided among the devices.

    Example:
        >>> mesh = jax.make_mesh((4,), ("data",))
        >>> sharding = jax.NamedSharding(mesh, jax.P("data"))
        >>> batch = nnx.sharding.global_batch({"x": np.zeros((8, 3))}, sharding)
        >>> batch["x"].sharding.shard_shape(batch["x"].shape)
        (2, 3)
    """
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x)), batch
    )


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
