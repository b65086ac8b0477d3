"""The cache with which attention decodes token by token.

Three Variables of the layer: keys and values, ``[*batch, max_length, heads, depth]``,
of which the first ``index`` entries are filled, and the index. A step asks for what the
cache will hold, attends to that, and writes last.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from graftree import _jax
from graftree.annotations import Dtype, Shape
from graftree.core.variables import variables
from graftree.core.variables.kinds import Cache


@dataclasses.dataclass(frozen=True)
class KeyValueCache:
    """The Variables that a layer decodes with.

    Attributes:
        keys: ``[*batch, max_length, heads, depth]``.
        values: Likewise.
        index: How many entries are filled, an int32.
    """

    keys: Cache[jax.Array]
    values: Cache[jax.Array]
    index: Cache[jax.Array]

    def extended(self, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What the cache holds with one more token; nothing is written.

        Args:
            key: ``[*batch, 1, heads, depth]``.
            value: Likewise.

        Returns:
            Keys and values, in the dtype of the cache.

        Raises:
            ValueError: If the shape is another one, or if the cache is full and the
                index is known: not in a trace, where the last entry is replaced.
        """
        index = self.index[...]
        *batch, max_length, heads, depth = self.keys.shape
        expected = (*batch, 1, heads, depth)
        for name, x in (("key", key), ("value", value)):
            if x.shape != expected:
                raise ValueError(
                    f"Autoregressive cache shape error, expected {name} shape "
                    f"{expected} instead got {x.shape}.\nDecode one token per call, "
                    "[*batch, 1, features], with the batch axes that `init_cache` got."
                )
        if not isinstance(index, _jax.Tracer) and int(index) >= max_length:
            raise ValueError(
                f"The cache of attention is full: cache_index is {index}, max_length "
                f"is {max_length}.\nMake a longer one with `init_cache`."
            )

        def extended(variable: Cache[jax.Array], x: jax.Array) -> jax.Array:
            old = variable[...]
            return jax.lax.dynamic_update_slice_in_dim(
                old, x.astype(old.dtype), index, axis=-3
            )

        return extended(self.keys, key), extended(self.values, value)

    def mask(self) -> jax.Array:
        """Lets a new token see the filled entries and its own.

        Returns:
            Booleans ``[1, ..., 1, max_length]``, of the rank of keys and values.
        """
        index = self.index[...]
        positions = jnp.arange(self.keys.shape[-3], dtype=index.dtype)
        return jnp.expand_dims(positions <= index, tuple(range(self.keys.ndim - 1)))

    def write(self, keys: jax.Array, values: jax.Array) -> None:
        """Stores what `extended` gave, and counts the token."""
        self.keys[...], self.values[...] = keys, values
        self.index[...] += 1


def empty(shape: Shape, dtype: Dtype) -> KeyValueCache:
    """Makes a cache for keys and values of this shape."""
    return KeyValueCache(
        Cache(jnp.zeros(shape, dtype)),
        Cache(jnp.zeros(shape, dtype)),
        Cache(jnp.zeros((), jnp.int32)),
    )


def of(layer: Any) -> KeyValueCache:
    """Finds the cache of a layer that is about to decode.

    Args:
        layer: Has ``cached_key``, ``cached_value`` and ``cache_index``.

    Raises:
        ValueError: If there is no cache.
        TraceContextError: If another trace owns it.
        ImmutableVariableError: If it is read-only.
    """
    boxes = (layer.cached_key, layer.cached_value, layer.cache_index)
    if any(variable is None for variable in boxes):
        raise ValueError(
            "Autoregressive cache not initialized.\nCall `init_cache((*batch, "
            "max_length, features))` first, or pass `decode=False`."
        )
    for variable in boxes:
        variables.check_write(variable)
    return KeyValueCache(*boxes)
