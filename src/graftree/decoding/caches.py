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

from graftree import _jax, errors
from graftree.annotations import (
    Array,
    ArrayLike,
    Bool,
    Dtype,
    Int,
    Integer,
    Num,
    Shaped,
)
from graftree.core.modules.modules import Module
from graftree.core.text import descriptions
from graftree.core.variables.kinds import Cache
from graftree.nn import attention
from graftree.nn.support import arguments, meshes


class KeyValueCache(Module):
    """Keys and values of an attention layer, for a batch of sequences.

    The token at a position is kept in the slot of that number; with a window shorter
    than ``max_length``, in a ring of ``window`` slots. A token with a negative position
    is padding: it is not kept, and no token sees it.

    Args:
        batch: The number of sequences.
        max_length: The number of slots for each.
        kv_heads: The number of heads of keys and values.
        head_dim: The features of a head.
        dtype: The dtype of keys and values: `nnx.precision.compute_dtype` of the layer,
            or a narrower one.
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
                negative for padding. Without a ring, a token beyond the last slot is an
                error, or in a trace, where positions are not known, not kept.

        Returns:
            Keys, values, and which of them each token sees, ``bool[batch, 1, length,
            seen]``: those at its own position and before, within the window. Keys and
            values are those of the slots; for several tokens and a ring, the earlier
            contents of the slots, followed by those of the tokens.

        Raises:
            ValueError: If the shapes don't fit the cache, or it has too few slots.
        """
        self._check(key, value, positions)
        key, value = key.astype(self.key.dtype), value.astype(self.value.dtype)
        if self.is_ring:
            return self._extend_ring(key, value, positions)
        keys, values = self._write(key, value, positions)
        sees = (
            positions[:, None, :, None] >= self._key_positions(positions)[:, None, None]
        )
        return keys, values, sees

    def _key_positions(self, positions: jax.Array) -> jax.Array:
        """Gives the positions of the keys that `extend` returns, ``[batch|1, seen]``.

        They are negative where there is no token yet, or padding.
        """
        slots = self.key.shape[1]
        if not self.is_ring:
            return jnp.arange(slots)[None]
        last = positions.max(axis=1, keepdims=True)
        if positions.shape[1] == 1:
            return _in_ring(last, slots)
        count = (positions >= 0).sum(axis=1, keepdims=True)
        return jnp.concatenate([_in_ring(last - count, slots), positions], axis=1)

    def _extend_ring(
        self, key: jax.Array, value: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        size, old_key, old_value = self.key.shape[1], self.key[...], self.value[...]
        old_key, key = meshes.together(old_key, key)
        old_value, value = meshes.together(old_value, value)
        last = positions.max(axis=1, keepdims=True)
        is_kept = positions > jnp.maximum(last - size, -1)
        slots = jnp.where(is_kept, positions % size, -1)
        keys, values = self._write(key, value, slots)
        key_positions = self._key_positions(positions)
        if positions.shape[1] == 1:
            return keys, values, (key_positions >= 0)[:, None, None]
        # No mask can remove it again: padding may have become NaN in the layer below.
        is_token = (positions >= 0)[:, :, None, None]
        key, value = jnp.where(is_token, key, 0), jnp.where(is_token, value, 0)
        distance = positions[:, :, None] - key_positions[:, None]
        sees = (key_positions[:, None] >= 0) & (distance >= 0) & (distance < size)
        keys = jnp.concatenate([old_key, key], axis=1)
        values = jnp.concatenate([old_value, value], axis=1)
        return keys, values, sees[:, None]

    def _check(self, key: Any, value: Any, positions: Any) -> None:
        expected = (self.key.shape[0], key.shape[1], *self.key.shape[2:])
        if key.shape != expected or value.shape != expected:
            raise ValueError(
                f"KeyValueCache of shape {self.key.shape} can't take a key and a value "
                f"of shapes {key.shape} and {value.shape}; both need {expected}."
            )
        if positions.shape != key.shape[:2]:
            raise ValueError(
                f"KeyValueCache.extend needs a position for each of {key.shape[:2]} "
                f"tokens, got positions of shape {positions.shape}."
            )
        if not self.is_ring:
            self._check_slots(key.shape[1], positions)

    def _check_slots(self, length: int, positions: Any) -> None:
        """Refuses more tokens than slots, and positions that are known to have none."""
        slots = self.key.shape[1]
        last = _last_known(positions)
        if length <= slots and last < slots:
            return
        tokens = f"{length} tokens" if length > slots else f"a token at position {last}"
        raise ValueError(
            errors.message(
                f"A KeyValueCache with {slots} slots has no room for {tokens}.",
                way_out="Make it longer: KeyValueCache(batch, max_length, ...), with "
                "max_length for prompt, padding and new tokens.",
            )
        )

    def _write(
        self, key: jax.Array, value: jax.Array, slots: jax.Array
    ) -> list[jax.Array]:
        """Writes tokens to their slots; those without one are left out.

        Returns:
            The contents of the cache, divided like the tokens.
        """
        rows = jnp.arange(key.shape[0])[:, None]
        contents = []
        for variable, new in ((self.key, key), (self.value, value)):
            old, new = meshes.together(variable[...], new)
            contents.append(
                old.at[rows, slots].set(
                    new,
                    mode="drop",
                    wrap_negative_indices=False,
                    **arguments.if_set(out_sharding=meshes.sharding_of(old)),
                )
            )
            variable[...] = contents[-1]
        return contents


def _last_known(positions: Any) -> int:
    """Returns the last of some positions, or -1 if this process can't read them."""
    if isinstance(positions, _jax.Tracer) or not positions.size:
        return -1
    if not getattr(positions, "is_fully_addressable", True):
        return -1
    return int(jax.device_get(positions).max())


def _in_ring(newest: jax.Array, slots: int) -> jax.Array:
    """Computes the position in each slot, negative where there is none yet.

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
    is_causal: bool = True,
    mask: Shaped[ArrayLike, "*mask_shape"] | None = None,
    bias: Num[ArrayLike, "*bias_shape"] | None = None,
    key_value_seq_lengths: Integer[ArrayLike, " batch"] | None = None,
    **options: Any,
) -> Num[Array, "batch length heads head_dim"]:
    """Computes causal attention for a language model, with or without a cache.

    One ``__call__`` then serves training, where a call has the whole sequence, and
    decoding, where it has the next tokens. The dtype of the cache doesn't change that
    of the result: keys and values come out of it in the dtype of the call's.

    Args:
        query: ``[batch, length, heads, head_dim]``.
        key: ``[batch, length, kv_heads, head_dim]``.
        value: Likewise.
        positions: Where in its sequence each token is; needed with a cache. Without
            one, tokens are in order, and padding on their left needs a ``mask``.
        cache: The cache to add keys and values to; ``None``: a token sees the tokens of
            the call, itself and those before.
        sliding_window: How many tokens a token sees, itself included; ``None``: all. It
            must be the window of the cache.
        is_causal: Always true: a token sees itself and those before.
        mask: Which of them it sees, broadcastable to ``[batch, heads, length, keys]``.
            Keys are the tokens of the call or, with a cache, its slots, where a token
            is at its position. A cache that is a ring takes one only if it is the same
            for all keys.
        bias: Added to the scaled dot products; of the shape of ``mask``.
        key_value_seq_lengths: How many tokens each sequence has; those at later
            positions are not seen.
        **options: Passed on to `nnx.dot_product_attention`, such as ``scale``.

    Returns:
        ``[batch, length, heads, head_dim]``.

    Raises:
        ValueError: If ``is_causal`` is false, if the windows differ, if a cache comes
            without positions or has too few slots, if ``mask`` or ``bias`` don't fit
            its slots, or as for `KeyValueCache.extend` and `nnx.dot_product_attention`.

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
    _check_causal(is_causal)
    if cache is None:
        return attention.dot_product_attention(
            query,
            key,
            value,
            bias,
            mask,
            is_causal=True,
            sliding_window=sliding_window,
            key_value_seq_lengths=key_value_seq_lengths,
            **options,
        )
    if positions is None:
        raise ValueError("nnx.decoding.attend needs positions with a cache.")
    _check_window(cache, sliding_window)
    mask = _over_slots("mask", mask, query, cache)
    bias = _over_slots("bias", bias, query, cache)
    lengths = attention.checked_lengths(key_value_seq_lengths, query.shape[:1])
    with arguments.undone_on_failure(cache.key, cache.value):
        keys, values, sees = cache.extend(key, value, positions)
        if mask is not None:
            sees = sees & mask.astype(bool)
        if lengths is not None:
            is_token = cache._key_positions(positions) < lengths[:, None]
            sees = sees & is_token[:, None, None]
        # The dtype of a cache says how it keeps numbers, and not how to compute.
        keys, values = keys.astype(key.dtype), values.astype(value.dtype)
        attend_to = attention.dot_product_attention
        return attend_to(query, keys, values, bias, sees, **options)


def _check_causal(is_causal: bool) -> None:
    if not is_causal:
        raise ValueError(
            errors.message(
                "nnx.decoding.attend is causal, and got is_causal=False.",
                way_out="For attention in both directions call "
                "nnx.dot_product_attention(query, key, value).",
            )
        )


def _check_window(cache: KeyValueCache, window: int | None) -> None:
    if cache.window != window:
        raise ValueError(
            f"nnx.decoding.attend got sliding_window={window} and a cache with "
            f"window={cache.window}.\nMake the cache with KeyValueCache(..., "
            f"window={window})."
        )


def _over_slots(
    name: str, x: Any, query: jax.Array, cache: KeyValueCache
) -> jax.Array | None:
    """Checks that the last axis of a mask or bias is that of the slots, or one."""
    if x is None:
        return None
    x, slots = jnp.asarray(x), cache.key.shape[1]
    if x.shape[-1:] == (1,) or (x.shape[-1:] == (slots,) and not cache.is_ring):
        batch, length, heads = query.shape[:3]
        return attention.to_rank(name, x, (batch, heads, length, slots))
    words = f"a ring, whose {slots} slots hold other tokens from call to call"
    way_out = "Make the cache without a window, and let the mask hide what is outside."
    if not cache.is_ring:
        words = f"{slots} slots, one for each position"
        way_out = (
            f"Give its last axis the size {slots}; a token's slot is its position."
        )
    raise ValueError(
        errors.message(
            f"nnx.decoding.attend: the {name} doesn't fit a cache with {words}.",
            where=f"{name} {descriptions.describe(x)}",
            way_out=way_out,
        )
    )
