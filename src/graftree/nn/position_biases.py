"""Biases of attention that depend on how far a key is from the query.

They tell queries and keys apart that are alike but for their positions, where nothing
else in a model does. Each is a Module that is called with positions of queries and of
keys, and returns what to add to their scaled dot products: ``[*batch, heads, queries,
keys]``. With a cache, the positions of the keys are those of its slots. What is not to
be seen, such as a slot without a token, must be masked: biases don't hide it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from graftree.annotations import (
    Array,
    ArrayLike,
    Dtype,
    Float,
    Initializer,
    Integer,
)
from graftree.core.modules.modules import Module
from graftree.core.rng.streams import Rngs
from graftree.nn import linear
from graftree.nn.support import arguments, eager, meshes


class RelativePositionBias(Module):
    """A learned bias for each head and distance, as in T5.

    Small distances have a bucket each, larger ones share buckets that widen
    logarithmically up to ``max_distance``; beyond, all share the last one. T5 has one
    such layer in its encoder and one in its decoder: make it once, outside of the
    blocks, and pass it, or what it returns, to each block.

    Args:
        num_heads: Number of query heads.
        num_buckets: Number of buckets; with ``bidirectional``, half are for keys before
            the query and half for those after it.
        max_distance: The distance from which on all share a bucket.
        bidirectional: Whether keys after the query count; if not, they share the bucket
            of distance zero.
        dtype: The dtype of the biases; ``None``: that of the table.
        param_dtype: The dtype in which the table is stored.
        embedding_init: Initializer of the table.
        rngs: Gives one key to the table.
        embedding_metadata: Metadata of the table.

    Attributes:
        embed: Embed, whose Param ``embedding`` is ``[num_buckets, num_heads]``;
            ``relative_attention_bias`` in T5's files.

    Raises:
        ValueError: If there are too few buckets, an odd number of them for two
            directions, or none left for distances up to ``max_distance``.

    Example:
        >>> bias = nnx.RelativePositionBias(
        ...     1, num_buckets=8, max_distance=6, rngs=nnx.Rngs(0)
        ... )
        >>> bias.embed.embedding[...] = jnp.arange(8.0)[:, None]  # the bucket's number
        >>> bias(jnp.array([4]), jnp.arange(10))
        Array([[[3., 2., 2., 1., 0., 5., 6., 6., 7., 7.]]], dtype=float32)

    References:
        Raffel et al., 2020, "Exploring the Limits of Transfer Learning with a Unified
        Text-to-Text Transformer", section 2.1.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        embedding_init: Initializer = linear.default_embed_init,
        rngs: Rngs,
        embedding_metadata: Mapping[str, Any] = arguments.NO_METADATA,
    ):
        arguments.check_sizes(
            self,
            num_heads=num_heads,
            num_buckets=num_buckets,
            max_distance=max_distance,
        )
        per_direction = num_buckets // 2 if bidirectional else num_buckets
        is_odd = bidirectional and num_buckets % 2 == 1
        if is_odd or per_direction < 2 or max_distance <= per_direction // 2:
            raise ValueError(
                f"RelativePositionBias can't divide distances up to {max_distance} into"
                f" {num_buckets} buckets{' of two directions' if bidirectional else ''}"
                ".\nEach direction needs two or more buckets, as many as the other, "
                "and a max_distance larger than half of them."
            )
        self.embed = linear.Embed(
            num_buckets,
            num_heads,
            dtype=dtype,
            param_dtype=param_dtype,
            embedding_init=embedding_init,
            rngs=rngs,
            embedding_metadata=embedding_metadata,
        )
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.bidirectional = bidirectional

    def __call__(
        self,
        query_positions: Integer[ArrayLike, "*#batch queries"],
        key_positions: Integer[ArrayLike, "*#batch keys"],
    ) -> Float[Array, "*#batch heads queries keys"]:
        """Looks up the bias of each query and key.

        Args:
            query_positions: Where in its sequence each query is, ``[*batch, queries]``.
            key_positions: The same for keys, ``[*batch, keys]``; batch axes of size one
                broadcast.

        Returns:
            An array ``[*batch, heads, queries, keys]``.

        Raises:
            ValueError: If the positions are not integers, or differ in rank.
        """
        buckets = _buckets(
            *_checked(self, query_positions, key_positions),
            num_buckets=self.num_buckets,
            max_distance=self.max_distance,
            bidirectional=self.bidirectional,
        )
        return jnp.moveaxis(self.embed(buckets), -1, -3)


@eager.compiled
def _buckets(
    queries: jax.Array,
    keys: jax.Array,
    *,
    num_buckets: int,
    max_distance: int,
    bidirectional: bool,
) -> jax.Array:
    """The bucket of each query and key, ``int32[*batch, queries, keys]``."""
    distances = np.arange(-max_distance, max_distance + 1)
    if bidirectional:
        half = num_buckets // 2
        buckets = _bucket(np.abs(distances), half, max_distance)
        buckets += half * (distances > 0)
    else:
        buckets = _bucket(np.maximum(-distances, 0), num_buckets, max_distance)
    ahead = jnp.clip(_ahead(queries, keys), -max_distance, max_distance)
    table = jnp.asarray(buckets, jnp.int32)[:, None]
    return meshes.look_up(table, ahead + max_distance, None)[..., 0]


def _bucket(distance: np.ndarray, buckets: int, max_distance: int) -> np.ndarray:
    """A bucket for each of the smallest distances, then logarithmically wider ones."""
    exact = buckets // 2
    octaves = np.log(np.maximum(distance, exact) / exact)
    share = octaves / math.log(max_distance / exact)
    wide = exact + (share * (buckets - exact)).astype(int)
    return np.where(distance < exact, distance, np.minimum(wide, buckets - 1))


class ALiBi(Module):
    """Attention with linear biases: ``-slope * distance``, a slope for each head.

    The slopes are ``2**(-max_bias * i / num_heads)`` for ``i = 1 .. num_heads``. If the
    number of heads is not a power of two, they are every second one of those of the
    next power, the steep ones first, and then the first of those that were left out.
    There is nothing to learn.

    Args:
        num_heads: Number of query heads, of any number.
        max_bias: Minus the exponent of the last slope; MPT's ``alibi_bias_max``.

    Raises:
        ValueError: If there is no head.

    Example:
        >>> alibi = nnx.ALiBi(2)
        >>> alibi(jnp.array([2]), jnp.arange(3))[:, 0]
        Array([[-0.125     , -0.0625    ,  0.        ],
               [-0.0078125 , -0.00390625,  0.        ]], dtype=float32)

    References:
        Press et al., 2022, "Train Short, Test Long: Attention with Linear Biases
        Enables Input Length Extrapolation", section 3.
    """

    def __init__(self, num_heads: int, *, max_bias: float = 8.0):
        arguments.check_sizes(self, num_heads=num_heads)
        if num_heads < 1:
            raise ValueError(f"ALiBi needs a head or more, got num_heads={num_heads}.")
        self.num_heads = num_heads
        self.max_bias = max_bias

    def __call__(
        self,
        query_positions: Integer[ArrayLike, "*#batch queries"],
        key_positions: Integer[ArrayLike, "*#batch keys"],
    ) -> Float[Array, "*#batch heads queries keys"]:
        """Computes the bias of each query and key.

        Args:
            query_positions: Where in its sequence each query is, ``[*batch, queries]``.
            key_positions: The same for keys, ``[*batch, keys]``; batch axes of size one
                broadcast. Those after the query count by their distance, too.

        Returns:
            A float32 array ``[*batch, heads, queries, keys]``.

        Raises:
            ValueError: If the positions are not integers, or differ in rank.
        """
        positions = _checked(self, query_positions, key_positions)
        settings = {"num_heads": self.num_heads, "max_bias": self.max_bias}
        return _linear_biases(*positions, **settings)


@eager.compiled
def _linear_biases(
    queries: jax.Array, keys: jax.Array, *, num_heads: int, max_bias: float
) -> jax.Array:
    """Distances times the slopes of the heads, ``[*batch, heads, queries, keys]``."""
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = 2.0 ** (-max_bias * np.arange(1, power + 1) / power)
    if power != num_heads:
        slopes = np.concatenate([slopes[1::2], slopes[::2]])[:num_heads]
    closeness = -jnp.abs(_ahead(queries, keys))[..., None, :, :].astype(jnp.float32)
    slopes = slopes.reshape((1,) * (closeness.ndim - 3) + (-1, 1, 1))
    return jnp.asarray(slopes, jnp.float32) * closeness


def _checked(layer: Module, queries: Any, keys: Any) -> tuple[jax.Array, jax.Array]:
    """Positions as arrays; refuses other numbers, and ranks that differ."""
    queries, keys = jnp.asarray(queries), jnp.asarray(keys)
    are_integers = [jnp.issubdtype(x.dtype, jnp.integer) for x in (queries, keys)]
    if not all(are_integers) or queries.ndim != keys.ndim or not keys.ndim:
        raise ValueError(
            f"{type(layer).__name__} needs integer positions of queries and of keys, "
            "[*batch, queries] and [*batch, keys], but got "
            f"{queries.dtype}{list(queries.shape)} and {keys.dtype}{list(keys.shape)}."
        )
    return queries, keys


def _ahead(queries: jax.Array, keys: jax.Array) -> jax.Array:
    """How far ahead of each query each key is, ``int32[*batch, queries, keys]``."""
    queries, keys = queries.astype(jnp.int32), keys.astype(jnp.int32)
    return keys[..., None, :] - queries[..., None]
