"""A leaf of an object on its way to disk, and back.

On disk are arrays, NumPy arrays and Python numbers. A `Target` says what a leaf of the
object to be restored is: it gets its value in the same form, on the same devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from graftree import _jax
from graftree.checkpoints import loading
from graftree.core.variables import partitioning

NUMBERS = (bool, int, float, complex)


class Target(NamedTuple):
    """What a leaf is that gets a value from disk."""

    kind: str  # "array", "numpy" or "number"
    shape: tuple[int, ...]
    dtype: Any
    sharding: jax.sharding.Sharding | None  # `None`: the default device
    weak_type: bool
    like: Any

    @property
    def is_key(self) -> bool:
        """Whether it is an array of random keys."""
        return _is_key(self.dtype)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to read."""
        return 0 in self.shape


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


class Unsupported(Exception):
    """A leaf can't be stored; the text says why."""


# ---------------------------------------------------------------- to disk


def to_disk(leaf: Any) -> Any:
    """What Orbax gets for a leaf; later changes of the leaf don't reach it.

    Raises:
        Unsupported: If the leaf can't be stored.
    """
    if isinstance(leaf, _jax.Tracer):
        raise Unsupported("is traced: save outside of jit and other transforms")
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise Unsupported("is abstract: it has no value")
    if isinstance(leaf, jax.Array):
        return _array_to_disk(leaf)
    if type(leaf) is complex:
        leaf = np.asarray(leaf)
    if isinstance(leaf, NUMBERS) and not isinstance(leaf, np.generic):
        return _number_to_disk(leaf)
    if isinstance(leaf, (np.ndarray, np.generic)):
        _check_dtype(leaf.dtype)
        return np.array(leaf) if leaf.size else None
    raise Unsupported(f"has the type {type(leaf).__name__}: no array, no number")


def _number_to_disk(number: Any) -> Any:
    if type(number) is int and not -(2**63) <= number < 2**63:
        raise Unsupported("is an integer of more than 64 bits")
    return number


def _array_to_disk(array: jax.Array) -> Any:
    if array.is_deleted():
        raise Unsupported("has been deleted or donated")
    if not _is_key(array.dtype):
        _check_dtype(array.dtype)
    if array.size == 0:
        return None  # Orbax refuses it; its shape says all.
    return array


def _check_dtype(dtype: Any) -> None:
    import tensorstore

    is_numeric = jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)
    try:
        tensorstore.dtype(np.dtype(dtype).name)
    except (TypeError, ValueError):
        is_numeric = False
    if not is_numeric or np.dtype(dtype).name in _UNREADABLE:
        raise Unsupported(f"has the dtype {dtype}, which Orbax can't store")


# TensorStore has them in memory, but its Zarr files don't.
_UNREADABLE = ("uint4",)


# ---------------------------------------------------------------- from disk


def target_of(leaf: Any, metadata: Mapping[str, Any]) -> Target:
    """What a leaf of an object, concrete or abstract, wants from disk.

    Args:
        leaf: The value.
        metadata: Of its Variable; an annotation of it says where an array belongs that
            has no sharding yet.

    Raises:
        Unsupported: If no value from disk can take its place.
    """
    if isinstance(leaf, jax.Array) and not isinstance(leaf, _jax.Tracer):
        sharding = leaf.sharding if leaf.committed else None
        weak = getattr(leaf, "weak_type", False)  # random keys have none
        return Target("array", leaf.shape, leaf.dtype, sharding, weak, leaf)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        leaf = partitioning.place_abstract(leaf, metadata)
        sharding = _concrete(leaf.sharding)
        weak = bool(leaf.weak_type)
        return Target("array", leaf.shape, leaf.dtype, sharding, weak, leaf)
    if isinstance(leaf, (np.ndarray, np.generic)):
        return Target("numpy", leaf.shape, leaf.dtype, None, False, leaf)
    if isinstance(leaf, NUMBERS):
        return Target("number", (), np.asarray(leaf).dtype, None, False, leaf)
    raise Unsupported(f"has the type {type(leaf).__name__}: no array, no number")


def _concrete(sharding: Any) -> Any:
    """The sharding over devices for one that may be over an abstract mesh."""
    mesh = getattr(sharding, "mesh", None)
    if not isinstance(mesh, jax.sharding.AbstractMesh):
        return sharding
    if mesh.empty:
        return None
    known = _jax.concrete_mesh()
    if known is None or known.abstract_mesh != mesh:
        raise Unsupported(
            f"has a sharding over the mesh {dict(mesh.shape)} without devices: restore "
            "within jax.set_mesh(mesh)"
        )
    return jax.sharding.NamedSharding(
        known, sharding.spec, memory_kind=sharding.memory_kind
    )


def wanted(target: Target, dtype: Any) -> jax.ShapeDtypeStruct | None:
    """How `orbax_side.read` is to read an array that has a dtype on disk."""
    # Without a sharding it comes as NumPy: JAX then has it on the default device
    # uncommitted, free to go where the arrays are that it meets.
    if target.kind != "array" or target.sharding is None or target.is_key:
        return None
    return jax.ShapeDtypeStruct(target.shape, dtype, sharding=target.sharding)


def from_disk(value: Any, target: Target) -> Any:
    """The leaf made of what was read, or of ``None`` where nothing had to be."""
    if value is None:
        value = np.zeros(target.shape, None if target.is_key else target.dtype)
    if target.kind == "number":
        return type(target.like)(np.asarray(value).item())
    if target.kind == "numpy":
        value = _cast(value, target.dtype)
        return value if isinstance(target.like, np.ndarray) else value[()]
    if target.is_key:
        return _key_from_disk(value, target)
    value = _cast(value, target.dtype)
    if not isinstance(value, jax.Array):
        value = jnp.array(value)
    return _as_weak(value) if target.weak_type else value


def _cast(value: Any, dtype: Any) -> Any:
    """The array with another dtype, in whose range its numbers must be."""
    if value.dtype == dtype:
        return value
    if not loading.is_in_range(value, dtype):
        raise ValueError(f"numbers from disk do not fit into {dtype}")
    return value.astype(dtype)


def _key_from_disk(data: Any, target: Target) -> Any:
    implementation = _implementation(target.dtype)
    if 0 in target.shape:
        tail = jax.eval_shape(
            lambda: jax.random.key_data(jax.random.key(0, impl=implementation))
        )
        data = np.zeros((*target.shape, *tail.shape), tail.dtype)

    def wrap(x: Any) -> jax.Array:
        return jax.random.wrap_key_data(x, impl=implementation)

    if target.sharding is None:
        return wrap(jnp.array(data))
    return jax.jit(wrap, out_shardings=target.sharding)(np.asarray(data))


def _as_weak(x: jax.Array) -> jax.Array:
    """The same array with a weak type: in arithmetic the other one's dtype counts.

    Only of the dtypes that numbers of Python have are there such arrays.
    """
    number = {"f": 0.0, "i": 0, "c": 0j}.get(x.dtype.kind)
    if number is None:
        return x
    with jax.enable_x64(x.dtype.itemsize == np.dtype(type(number)).itemsize):
        weak = jax.lax.full(x.shape, number)
        if weak.dtype != x.dtype:
            return x
        weak = weak.at[...].set(x)
    return jax.device_put(weak, x.sharding if x.committed else None)


def _implementation(dtype: Any) -> Any:
    """How arrays of random keys of a dtype work, as ``jax.random`` takes it."""
    found = list[Any]()

    def ask(keys: Any) -> None:
        found.append(jax.random.key_impl(keys))

    jax.eval_shape(ask, jax.ShapeDtypeStruct((), dtype))
    return found[0]
