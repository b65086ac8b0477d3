"""The cache that a `MultiHeadAttention` can have of its own, as in Flax.

It is three Variables of the layer: keys and values, ``[*batch, max_length, heads,
depth]``, whose first ``index`` entries are filled, and the index. A step computes the
new contents, attends to them, and writes last. `KeyValueCache` is not part of a layer,
takes several tokens at once, and has more options.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from graftree import _jax
from graftree.core.variables import variables
from graftree.core.variables.kinds import Cache
from graftree.nn.attention_patterns import KeysAndValues
from graftree.nn.support import meshes


def variables_of(layer: Any) -> list[Cache[jax.Array]]:
    """Keys, values and index of a layer that is about to decode.

    Raises:
        ValueError: If there is no cache.
        TraceContextError: If another trace owns it.
        ImmutableVariableError: If it is read-only.
    """
    cache = [layer.cached_key, layer.cached_value, layer.cache_index]
    existing = [variable for variable in cache if variable is not None]
    if len(existing) < len(cache):
        raise ValueError(
            "Autoregressive cache not initialized.\nCall `init_cache((*batch, "
            "max_length, features))` first, or pass `decode=False`."
        )
    for variable in existing:
        variables.check_write(variable)
    return existing


def extended(
    cache: list[Cache[jax.Array]], keys: KeysAndValues
) -> tuple[KeysAndValues, list[jax.Array]]:
    """Computes the contents of the cache with one more token; writes nothing.

    Args:
        cache: Keys, values and index.
        keys: Those of the token, ``[*batch, 1, heads, depth]``.

    Returns:
        Keys and values in the dtype of the token's, and what to write: keys and values,
        in the dtype of the cache, and the index.

    Raises:
        ValueError: If the shape is another one, or if the cache is full and the index
            is known: not in a trace, where the last entry is replaced.
    """
    *olds, index = [variable[...] for variable in cache]
    news = (keys.key, keys.value)
    *batch, max_length, heads, _ = olds[0].shape
    for name, old, x in zip(("key", "value"), olds, news, strict=True):
        expected = (*batch, 1, heads, old.shape[-1])
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
    insert = functools.partial(
        jax.lax.dynamic_update_slice_in_dim, start_index=index, axis=-3
    )
    pairs = [
        meshes.together(old, x.astype(old.dtype))
        for old, x in zip(olds, news, strict=True)
    ]
    filled = [insert(old, x) for old, x in pairs]
    key, value = (x.astype(new.dtype) for x, new in zip(filled, news, strict=True))
    slots = jnp.arange(max_length, dtype=index.dtype)
    return KeysAndValues(key, value, slots), [*filled, index + 1]
