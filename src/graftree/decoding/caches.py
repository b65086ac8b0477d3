"""Keys and values of the tokens so far, so that none is computed twice.

A cache keeps all tokens or, with a window, the last ones in a ring. There the token at
position ``p`` is in slot ``p % slots``. Positions of a sequence have no gaps, so the
newest one says which position is in each slot, and nothing else has to be stored.

A chunk of several tokens may be longer than the ring: its first tokens then need
entries that its last ones replace. So they see the ring as it was, followed by the
chunk. A single token needs nothing that it replaces, and sees the ring as it is after.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from graftree.annotations import Array, Bool, Dtype, Int, Num
from graftree.core.modules.modules import Module
from graftree.core.variables.kinds import Cache
from graftree.nn import attention


class KeyValueCache(Module):
    """The keys and values of an attention layer, for a batch of sequences.

    The token at a position is kept in the slot of that number; with a window shorter
    than ``max_length``, in a ring of ``window`` slots. A token with a negative position
    is padding: it is not kept, and no token sees it.

    Args:
        batch: The number of sequences.
        max_length: The number of slots for each.
        kv_heads: The number of heads of keys and values.
        head_dim: The features of a head.
        dtype: The dtype of keys and values.
        window: How many tokens a token sees, itself included, as ``sliding_window`` of
            `nnx.dot_product_attention`; ``None``: all. With a window, each call must
            continue at the position after the last one, without gaps.

    Attributes:
        key, value: Cache, ``[batch, slots, kv_heads, head_dim]``, with
            ``min(max_length, window)`` slots.
        window: As given.
        is_ring: Whether the window is shorter than ``max_length``.

    Raises:
        ValueError: If the window is less than one.

    Example:
        >>> cache = nnx.decoding.KeyValueCache(2, 8, kv_heads=1, head_dim=4)
        >>> x = jnp.ones((2, 3, 1, 4))
        >>> positions = jnp.broadcast_to(jnp.arange(3), (2, 3))
        >>> key, value, mask = cache.extend(x, x, positions)
        >>> key.shape, mask.shape, mask[0, 0].sum(axis=-1)
        ((2, 8, 1, 4), (2, 1, 3, 8), Array([1, 2, 3], dtype=int32))

        With a window of two tokens, only two are kept:

        >>> cache = nnx.decoding.KeyValueCache(2, 8, kv_heads=1, head_dim=4, window=2)
        >>> key, value, mask = cache.extend(x, x, positions)
        >>> cache.key.shape, mask[0, 0].sum(axis=-1)
        ((2, 2, 1, 4), Array([1, 2, 2], dtype=int32))

    References:
        Jiang et al., 2023, "Mistral 7B", section 2, "Rolling Buffer Cache".
    """

    def __init__(
        self,
        batch: int,
        max_length: int,
        *,
        kv_heads: int,
        head_dim: int,
        dtype: Dtype = jnp.float32,
        window: int | None = None,
    ):
        if window is not None and window < 1:
            raise ValueError(f"The window of a KeyValueCache is at least 1: {window}.")
        slots = max_length if window is None else min(max_length, window)
        shape = (batch, slots, kv_heads, head_dim)
        self.key = Cache(jnp.zeros(shape, dtype))
        self.value = Cache(jnp.zeros(shape, dtype))
        self.window = window
        self.is_ring = slots < max_length

    def extend(
        self,
        key: Num[Array, "batch length kv_heads head_dim"],
        value: Num[Array, "batch length kv_heads head_dim"],
        positions: Int[Array, "batch length"],
    ) -> tuple[
        Num[Array, "batch seen kv_heads head_dim"],
        Num[Array, "batch seen kv_heads head_dim"],
        Bool[Array, "batch 1 length seen"],
    ]:
        """Adds the keys and values of tokens; returns all that these tokens may see.

        Args:
            key: ``[batch, length, kv_heads, head_dim]``.
            value: Likewise.
            positions: Where in its sequence each token is, ``int[batch, length]``;
                negative for padding. Without a ring, a token beyond the last slot is
                not kept.

        Returns:
            Keys, values, and which of them each token sees, ``bool[batch, 1, length,
            seen]``: those at its own position and before, within the window. Keys and
            values are those of the slots; for several tokens and a ring, the earlier
            contents of the slots, followed by those of the tokens.

        Raises:
            ValueError: If the shapes don't fit the cache.
        """
        self._check(key, value, positions)
        key, value = key.astype(self.key.dtype), value.astype(self.value.dtype)
        if self.is_ring:
            return self._extend_ring(key, value, positions)
        self._write(key, value, positions)
        slots = jnp.arange(self.key.shape[1])[None, None, None]
        sees = positions[:, None, :, None] >= slots
        return self.key[...], self.value[...], sees

    def _extend_ring(
        self, key: jax.Array, value: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        size, old_key, old_value = self.key.shape[1], self.key[...], self.value[...]
        last = positions.max(axis=1, keepdims=True)
        is_kept = positions > jnp.maximum(last - size, -1)
        self._write(key, value, jnp.where(is_kept, positions % size, -1))
        if positions.shape[1] == 1:
            sees = _in_ring(last, size) >= 0
            return self.key[...], self.value[...], sees[:, None, None]
        count = (positions >= 0).sum(axis=1, keepdims=True)
        # No mask can remove it again: padding may have become NaN in the layer below.
        is_token = (positions >= 0)[:, :, None, None]
        key, value = jnp.where(is_token, key, 0), jnp.where(is_token, value, 0)
        seen = jnp.concatenate([_in_ring(last - count, size), positions], axis=1)
        seen, back = seen[:, None], positions[:, :, None] - seen[:, None]
        sees = (seen >= 0) & (back >= 0) & (back < size)
        keys = jnp.concatenate([old_key, key], axis=1)
        values = jnp.concatenate([old_value, value], axis=1)
        return keys, values, sees[:, None]

    def _check(self, key: Any, value: Any, positions: Any) -> None:
        wanted = (self.key.shape[0], key.shape[1], *self.key.shape[2:])
        if key.shape != wanted or value.shape != wanted:
            raise ValueError(
                f"KeyValueCache of shape {self.key.shape} can't take a key and a value "
                f"of shapes {key.shape} and {value.shape}; both need {wanted}."
            )
        if positions.shape != key.shape[:2]:
            raise ValueError(
                f"KeyValueCache.extend needs a position for each of {key.shape[:2]} "
                f"tokens, got positions of shape {positions.shape}."
            )

    def _write(self, key: jax.Array, value: jax.Array, slots: jax.Array) -> None:
        """Writes tokens to their slots; those without one are left out."""
        rows = jnp.arange(key.shape[0])[:, None]
        for held, new in ((self.key, key), (self.value, value)):
            at = held[...].at[rows, slots]
            held.set_value(at.set(new, mode="drop", wrap_negative_indices=False))


def _in_ring(newest: jax.Array, slots: int) -> jax.Array:
    """The position in each slot, negative where there is none yet.

    Args:
        newest: The newest position of each sequence, ``[batch, 1]``.
        slots: Their number.
    """
    return newest - (newest - jnp.arange(slots)[None]) % slots


def attend(
    query: Num[Array, "batch length heads head_dim"],
    key: Num[Array, "batch length kv_heads head_dim"],
    value: Num[Array, "batch length kv_heads head_dim"],
    positions: Int[Array, "batch length"] | None = None,
    cache: KeyValueCache | None = None,
    *,
    sliding_window: int | None = None,
    **options: Any,
) -> Num[Array, "batch length heads head_dim"]:
    """Causal attention of a language model, with or without a cache.

    One ``__call__`` then serves training, where a call has the whole sequence, and
    decoding, where it has the next tokens.

    Args:
        query: ``[batch, length, heads, head_dim]``.
        key: ``[batch, length, kv_heads, head_dim]``.
        value: Likewise.
        positions: Where in its sequence each token is; needed with a cache.
        cache: The cache to add keys and values to; ``None``: a token sees the tokens of
            the call, itself and those before.
        sliding_window: How many tokens a token sees, itself included; ``None``: all. It
            must be the window of the cache.
        **options: Passed on to `nnx.dot_product_attention`, such as ``scale``.

    Returns:
        ``[batch, length, heads, head_dim]``.

    Raises:
        ValueError: If the windows differ, if a cache comes without positions, or as for
            `KeyValueCache.extend` and `nnx.dot_product_attention`.

    Example:
        >>> x = jax.random.normal(jax.random.key(0), (1, 3, 1, 4))
        >>> y = nnx.decoding.attend(x, x, x)
        >>> cache = nnx.decoding.KeyValueCache(1, 8, kv_heads=1, head_dim=4)
        >>> tokens = [
        ...     nnx.decoding.attend(*[x[:, t : t + 1]] * 3, jnp.array([[t]]), cache)
        ...     for t in range(3)
        ... ]
        >>> jnp.allclose(jnp.concatenate(tokens, axis=1), y, atol=1e-6)
        Array(True, dtype=bool)
    """
    if cache is None:
        options |= {"is_causal": True, "sliding_window": sliding_window}
        return attention.dot_product_attention(query, key, value, **options)
    if positions is None:
        raise ValueError("nnx.decoding.attend needs positions with a cache.")
    if cache.window != sliding_window:
        raise ValueError(
            f"nnx.decoding.attend got sliding_window={sliding_window} and a cache with "
            f"window={cache.window}.\nMake the cache with KeyValueCache(..., "
            f"window={sliding_window})."
        )
    key, value, mask = cache.extend(key, value, positions)
    return attention.dot_product_attention(query, key, value, mask=mask, **options)
