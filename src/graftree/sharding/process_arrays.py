"""Arrays of several processes: made of the rows of each, and read in each.

`global_batch` joins the rows of all processes into global arrays; `fetch` reads these
in each process. First the processes agree that all of them can.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from graftree import errors
from graftree.core import paths
from graftree.core.states import pure_dicts
from graftree.core.text import descriptions
from graftree.sharding import collectives, placement


def global_batch(batch: Any, sharding: jax.sharding.Sharding) -> Any:
    """Joins the rows of each process into arrays of all processes.

    All processes must call it. They first compare the shapes and dtypes of their rows,
    which takes a message to the first process, and one back.

    Args:
        batch: A pytree of NumPy arrays, of values that convert to them, or of random
            keys: the rows of this process. All processes have the same number of rows.
        sharding: Where the rows go, e.g. ``NamedSharding(mesh, P("data"))``.

    Returns:
        A pytree of arrays whose first axis has the rows of all processes. With a single
        process these are its rows.

    Raises:
        ValueError: If an axis of an array can't be divided among the devices, or it has
            no such axis, or no numbers; lists all of these by path. Also if the rows
            differ in number or dtype between the processes.
        ProcessError: If a process does not call it.

    Example:
        >>> mesh = jax.make_mesh((4,), ("data",))
        >>> sharding = jax.NamedSharding(mesh, jax.P("data"))
        >>> batch = nnx.sharding.global_batch({"x": np.zeros((8, 3))}, sharding)
        >>> batch["x"].sharding.shard_shape(batch["x"].shape)
        (2, 3)
    """
    leaves, treedef = jax.tree.flatten_with_path(batch)
    members = sorted({device.process_index for device in sharding.device_set})
    if members == [jax.process_index()]:
        _check_rows(leaves, sharding)
    else:
        _check_rows_of_all(leaves, sharding, members)
    return treedef.unflatten([joined_rows(leaf, sharding) for _, leaf in leaves])


_BATCH = "nnx.sharding.global_batch"


def _check_rows(leaves: Sequence[Any], sharding: jax.sharding.Sharding) -> None:
    """Raises if the rows of this process can't be divided among its devices."""
    problems = [
        f"{paths.dotted(paths.from_jax(path), 'the batch')} {problem}"
        for path, leaf in leaves
        if (problem := _problem_of_rows(leaf, sharding)) is not None
    ]
    if problems:
        raise ValueError(
            errors.message(
                f"{_BATCH}: not all of the batch can be divided.",
                where="\n".join(problems[:12]),
                way_out="Drop or pad the last rows; pass arrays with other axes in a "
                "separate call, with their own sharding.",
            )
        )


def _check_rows_of_all(
    leaves: Sequence[Any], sharding: jax.sharding.Sharding, members: Sequence[int]
) -> None:
    """Raises, in all processes, unless their rows can be joined."""
    forms = [
        f"{paths.dotted(paths.from_jax(path), 'the batch')} {_form(leaf)}"
        for path, leaf in leaves
    ]

    def act() -> list[str]:
        _check_rows(leaves, sharding)
        return forms

    everyone = collectives.gathered(_BATCH, act, topic=f"{forms}", among=members)
    _check_same(
        f"{_BATCH}: the processes have different rows.",
        dict(zip(members, everyone, strict=True)),
        "Give all of them the same number: drop or pad the last rows.",
    )


def _check_same(message: str, everyone: Mapping[int, list[str]], way_out: str) -> None:
    """Raises unless all processes have the same lines."""
    [first, *_] = everyone.values()
    differing = {member: lines for member, lines in everyone.items() if lines != first}
    if not differing:
        return
    member, other = next(iter(differing.items()))
    common = {*first} & {*other}
    texts = [
        f"process {i}: {', '.join([x for x in lines if x not in common][:6]) or 'none'}"
        for i, lines in {min(everyone): first, member: other}.items()
    ]
    raise ValueError(errors.message(message, where="\n".join(texts), way_out=way_out))


def _form(leaf: Any) -> str:
    return descriptions.describe(leaf if _is_key(leaf) else np.asarray(leaf))


def joined_rows(leaf: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """Joins the rows of each process, which were checked, into one array."""
    if not _is_key(leaf):
        return jax.make_array_from_process_local_data(sharding, np.asarray(leaf))
    data = np.asarray(jax.random.key_data(leaf))
    placed = jax.make_array_from_process_local_data(sharding, data)
    return jax.random.wrap_key_data(placed, impl=jax.random.key_impl(leaf))


def _is_key(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _problem_of_rows(leaf: Any, sharding: jax.sharding.Sharding) -> str | None:
    """Says why a leaf can't be placed or divided, if it can't."""
    if not _is_key(leaf):
        leaf = np.asarray(leaf)
        if not (jnp.issubdtype(leaf.dtype, np.number) or leaf.dtype == np.bool_):
            return f"has the dtype {leaf.dtype}: it is not an array of numbers"
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    spec = sharding.spec
    if len(spec) > leaf.ndim:
        return f"has the shape {leaf.shape}, but the sharding is for {len(spec)} axes"
    for i, entry in enumerate(spec):
        axes = placement.axes_of(entry)
        count = math.prod(sharding.mesh.shape[axis] for axis in axes)
        local_count = _local_count(sharding.mesh, entry, count) if axes else 1
        size = leaf.shape[i]
        if size % local_count:
            text = f"{size} rows" if i == 0 else f"the size {size} of axis {i}"
            return (
                f"has {text} in this process, not a multiple of its {local_count} "
                f"parts of the axis {', '.join(axes)} of the mesh"
            )
    return None


def _local_count(mesh: Any, entry: Any, count: int) -> int:
    """Counts the parts of an axis that are on devices of this process."""
    one_each = NamedSharding(mesh, PartitionSpec(entry))
    indices: Any = one_each.addressable_devices_indices_map((count,))
    return len({rows.indices(count) for (rows,) in indices.values()})


def fetch(tree: Any) -> Any:
    """Reads arrays that are spread over processes, in each of them.

    All processes must call it, with the same tree: they send each other the parts that
    they lack. Use it, for example, to read a metric of a global batch.

    Args:
        tree: A pytree of arrays and Variables; also an object.

    Returns:
        The same tree with whole NumPy arrays. Random keys stay keys, and values that
        are not numbers, such as strings, stay as they are.

    Raises:
        ValueError: If an array has been deleted, or the processes give different ones.
        ProcessError: If a process does not call it.

    Example:
        >>> metric = nnx.metrics.Average()
        >>> metric.update(values=jnp.arange(4.0))
        >>> nnx.sharding.fetch(metric.compute()).item()
        1.5
    """
    pure = pure_dicts.as_pure(tree)
    spread = [leaf for leaf in jax.tree.leaves(pure) if _is_spread(leaf)]
    if spread:
        _check_spread(spread)
    return jax.tree.map(read, pure)


def _is_spread(x: Any) -> bool:
    """Whether a process must get a part of it from others."""
    return isinstance(x, jax.Array) and not (
        x.is_fully_addressable or x.is_fully_replicated
    )


def _check_spread(arrays: Sequence[jax.Array]) -> None:
    """Raises, in all processes, unless they have the same arrays and can send them."""

    def act() -> list[str]:
        forms = [f"{i}: {descriptions.describe(x)}" for i, x in enumerate(arrays)]
        if any(map(descriptions.is_deleted, arrays)):
            raise ValueError(f"{_FETCH}: an array has been donated or deleted.")
        return forms

    devices = set[Any]().union(*(x.sharding.device_set for x in arrays))
    members = sorted({device.process_index for device in devices})
    everyone = collectives.gathered(_FETCH, act, among=members)
    _check_same(
        f"{_FETCH}: the processes ask for different arrays.",
        dict(zip(members, everyone, strict=True)),
        "Pass the same tree in all processes.",
    )


_FETCH = "nnx.sharding.fetch"


def read(x: Any) -> Any:
    """Reads one value, for which all processes are ready."""
    if _is_key(x):
        if x.is_fully_addressable:
            return x
        data = read(jax.random.key_data(x))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if _is_spread(x):
        # Here, because most programs have one process.
        from jax.experimental import multihost_utils

        return multihost_utils.process_allgather(x, tiled=True)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return np.asarray(x.addressable_data(0))
    is_number = isinstance(x, (jax.Array, np.ndarray, np.generic, int, float, complex))
    return np.asarray(x) if is_number else x
