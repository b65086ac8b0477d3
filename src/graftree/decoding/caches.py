"""Keys and values of the tokens so far, so that none is computed twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from graftree.annotations import Dtype
from graftree.core.modules.modules import Module
from graftree.core.variables.kinds import Cache

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int, Num


class KeyValueCache(Module):
    """The keys and values of an attention layer, for a batch of sequences.

    The token at a position is kept in the slot of that number. So sequences of
    different lengths are padded on the right: what padding has written lies behind all
    tokens, where nothing sees it, until the next token takes its place.

    Args:
        batch: The number of sequences.
        max_length: The number of slots for each.
        kv_heads: The number of heads of keys and values.
        head_dim: The features of a head.
        dtype: Of keys and values.

    Attributes:
        key, value: Cache, ``[batch, max_length, kv_heads, head_dim]``.

    Example:
        >>> cache = nnx.decoding.KeyValueCache(2, 8, kv_heads=1, head_dim=4)
        >>> x = jnp.ones((2, 3, 1, 4))
        >>> positions = jnp.broadcast_to(jnp.arange(3), (2, 3))
        >>> key, value, mask = cache.extend(x, x, positions)
        >>> key.shape, mask.shape, mask[0, 0].sum(axis=-1)
        ((2, 8, 1, 4), (2, 1, 3, 8), Array([1, 2, 3], dtype=int32))
    """

    def __init__(
        self,
        batch: int,
        max_length: int,
        *,
        kv_heads: int,
        head_dim: int,
        dtype: Dtype = jnp.float32,
    ):
        shape = (batch, max_length, kv_heads, head_dim)
        self.key = Cache(jnp.zeros(shape, dtype))
        self.value = Cache(jnp.zeros(shape, dtype))

    def extend(
        self,
        key: Num[Array, "batch length kv_heads head_dim"],
        value: Num[Array, "batch length kv_heads head_dim"],
        positions: Int[Array, "batch length"],
    ) -> tuple[
        Num[Array, "batch max_length kv_heads head_dim"],
        Num[Array, "batch max_length kv_heads head_dim"],
        Bool[Array, "batch 1 length max_length"],
    ]:
        """Adds the keys and values of tokens, and gives all that there are.

        Args:
            key: ``[batch, length, kv_heads, head_dim]``.
            value: Likewise.
            positions: Where in its sequence each token is, ``int[batch, length]``. One
                behind the last slot is not kept.

        Returns:
            All keys, all values, and which of them each token sees: those at its own
            position and before, ``bool[batch, 1, length, max_length]``.

        Raises:
            ValueError: If the shapes don't fit the cache.
        """
        batch, max_length = self.key.shape[:2]
        wanted = (batch, key.shape[1], *self.key.shape[2:])
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
        rows = jnp.arange(batch)[:, None]
        for held, new in ((self.key, key), (self.value, value)):
            kept = (
                held[...].at[rows, positions].set(new.astype(held.dtype), mode="drop")
            )
            held.set_value(kept)
        slots = jnp.arange(max_length)[None, None, None]
        sees = positions[:, None, :, None] >= slots
        return self.key[...], self.value[...], sees
