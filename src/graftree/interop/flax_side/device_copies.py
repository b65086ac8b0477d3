"""Copies of data on several devices, for ``pmap``: ``flax.jax_utils``."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_AXIS = "_device_put_sharded"


def replicate(
    tree: Any, devices: Sequence[Any] | None = None, axis_name: str = _AXIS
) -> Any:
    """Copies a pytree to several devices.

    Args:
        tree: A pytree of arrays.
        devices: The devices; by default all of this process.
        axis_name: The name of the axis of the mesh that they form.

    Returns:
        A pytree of arrays ``[devices, ...]``, one row on each device.

    Example:
        >>> from graftree.interop.flax_side import device_copies
        >>> copies = device_copies.replicate({"w": jnp.ones(3)}, jax.devices()[:1])
        >>> copies["w"].shape
        (1, 3)
    """
    chosen = jax.local_devices() if devices is None else list(devices)
    sharding = _sharding(chosen, axis_name)

    def copies(leaf: Any) -> jax.Array:
        row = jnp.asarray(leaf)[None]
        shape = (len(chosen), *row.shape[1:])
        rows = [jax.device_put(row, device) for device in chosen]
        return jax.make_array_from_single_device_arrays(shape, sharding, rows)

    return jax.tree.map(copies, tree)


def _sharding(devices: Sequence[Any], axis_name: str) -> NamedSharding:
    return NamedSharding(Mesh(np.array(devices), axis_name), PartitionSpec(axis_name))


def unreplicate(tree: Any) -> Any:
    """Takes the first of the copies that `replicate` made.

    Args:
        tree: A pytree of arrays ``[devices, ...]``.

    Returns:
        A pytree of their first rows.

    Example:
        >>> from graftree.interop.flax_side import device_copies
        >>> device_copies.unreplicate({"w": jnp.ones((4, 3))})["w"].shape
        (3,)
    """
    return jax.tree.map(lambda leaf: leaf[0], tree)


def prefetch_to_device(
    iterator: Iterable[Any],
    size: int,
    devices: Sequence[Any] | None = None,
    axis_name: str = _AXIS,
) -> Iterator[Any]:
    """Puts batches on devices ahead of their use.

    Args:
        iterator: Gives pytrees of arrays ``[devices * n, ...]``.
        size: How many batches wait on the devices; 2 is enough for one GPU.
        devices: The devices that share a batch; by default all of this process.
        axis_name: The name of the axis of the mesh that they form.

    Returns:
        An iterator over the same batches, split over the devices along axis 0.

    Raises:
        ValueError: If ``size`` is not positive, or an array can't be split evenly.

    Example:
        >>> from graftree.interop.flax_side import device_copies
        >>> batches = device_copies.prefetch_to_device(
        ...     [np.ones(1), np.zeros(1)], size=2, devices=jax.devices()[:1]
        ... )
        >>> [batch.item() for batch in batches]
        [1.0, 0.0]
    """
    if size < 1:
        raise ValueError(
            f"At least one batch must wait on the devices, got size={size}."
        )
    chosen = jax.local_devices() if devices is None else list(devices)
    return _ahead(iter(iterator), size, _sharding(chosen, axis_name))


def _ahead(batches: Iterator[Any], size: int, sharding: NamedSharding) -> Iterator[Any]:
    placed = (jax.device_put(batch, sharding) for batch in batches)
    waiting = collections.deque(itertools.islice(placed, size))
    while waiting:
        yield waiting.popleft()
        waiting.extend(itertools.islice(placed, 1))
