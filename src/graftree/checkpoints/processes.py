"""Programs of several processes: who acts, who waits, and what they must agree on.

With one process nothing here does anything.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from graftree import errors


def is_first() -> bool:
    """Whether this process is the one that moves and deletes folders."""
    return jax.process_index() == 0


def wait_for_all(name: str) -> None:
    """Waits until all processes are here."""
    if jax.process_count() > 1:
        _multihost().sync_global_devices(f"graftree:{name}")


def agreed(value: Any) -> Any:
    """What the first process has; a number or a boolean."""
    if jax.process_count() == 1:
        return value
    return type(value)(_multihost().broadcast_one_to_all(np.asarray(value)))


def by_first(act: Callable[[], None]) -> None:
    """Has the first process do something; the error that it gets, all get.

    Raises:
        CheckpointError: What ``act`` raises.
    """
    if jax.process_count() == 1:
        return act()
    problem = ""
    if is_first():
        try:
            act()
        except errors.CheckpointError as error:
            problem = str(error)
    problem = json.loads(gathered(json.dumps(problem).encode())[0])
    if problem:
        raise errors.CheckpointError(problem)


def gathered(data: bytes) -> list[bytes]:
    """What each process has, in their order."""
    if jax.process_count() == 1:
        return [data]
    multihost = _multihost()
    sizes = multihost.process_allgather(np.asarray(len(data)))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    rows = multihost.process_allgather(padded)
    return [bytes(row[:size]) for row, size in zip(rows, sizes, strict=True)]


def shared(leaves: Sequence[Any]) -> list[Any]:
    """Makes arrays that each process has for itself arrays of all processes.

    Orbax stores only those. It is the usual state of counters and random keys.

    Raises:
        ValueError: If they differ, as only one of them would be stored.
    """
    if jax.process_count() == 1:
        return [*leaves]
    local = [i for i, leaf in enumerate(leaves) if _is_local(leaf)]
    _check_same([leaves[i] for i in local])
    made = [*leaves]
    for i in local:
        made[i] = _global(leaves[i])
    return made


def _is_local(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.is_fully_addressable


def _check_same(local: Sequence[Any]) -> None:
    digest = hashlib.sha256()
    for leaf in local:
        digest.update(_data(leaf).tobytes())
    if len({*gathered(digest.digest())}) > 1:
        raise ValueError(
            "nnx.checkpoints: arrays that each process holds for itself differ "
            "between the processes, and only those of the first would be saved.\nMake "
            "them with the same seed everywhere, or shard them over all devices."
        )


def _data(leaf: jax.Array) -> np.ndarray:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def _global(leaf: jax.Array) -> jax.Array:
    """The same array, replicated over one device of each process."""
    devices = {d.process_index: d for d in reversed(jax.devices())}
    mesh = jax.sharding.Mesh(
        np.array([devices[i] for i in sorted(devices)]), "processes"
    )
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    data = _data(leaf)
    made = jax.make_array_from_callback(data.shape, sharding, lambda index: data[index])
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        made = jax.random.wrap_key_data(made, impl=jax.random.key_impl(leaf))
    return made


def _multihost() -> Any:
    from jax.experimental import multihost_utils

    return multihost_utils
