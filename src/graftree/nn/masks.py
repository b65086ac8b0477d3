"""Attention masks: who may look at whom.

A mask broadcasts to ``[*batch, heads, query length, key length]``, the shape of the
attention weights; an entry that is false or zero takes a key away from a query.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from graftree.annotations import Dtype
from graftree.nn.support import operations

if TYPE_CHECKING:
    from jaxtyping import Array, Shaped


def make_attention_mask(
    query_input: Shaped[Array, "*batch queries"],
    key_input: Shaped[Array, "*batch keys"],
    pairwise_fn: Callable[..., Any] = jnp.multiply,
    extra_batch_dims: int = 0,
    dtype: Dtype = jnp.float32,
) -> Shaped[Array, "*extra_and_batch 1 queries keys"]:
    """Compares every query with every key of the same sequence.

    Entry ``[..., 0, i, j]`` is ``pairwise_fn(query_input[..., i], key_input[..., j])``.

    Args:
        query_input: One entry per query, ``[*batch, queries]``: whether the token is a
            real one, for example, or the number of the document it belongs to.
        key_input: One entry per key, ``[*batch, keys]``.
        pairwise_fn: Says of two arrays that broadcast against each other which pairs
            may meet. By default both entries must not be zero.
        extra_batch_dims: How many axes of size one to put in front.
        dtype: The dtype of the mask.

    Returns:
        A mask ``[1, ..., 1, *batch, 1, queries, keys]``.

    Example:
        >>> is_token = jnp.array([1, 1, 0])
        >>> nnx.make_attention_mask(is_token, is_token, dtype=bool)
        Array([[[ True,  True, False],
                [ True,  True, False],
                [False, False, False]]], dtype=bool)
    """
    pairs = operations.current(pairwise_fn)(
        jnp.expand_dims(query_input, axis=-1), jnp.expand_dims(key_input, axis=-2)
    )
    mask = jnp.expand_dims(pairs, (*range(extra_batch_dims), -3))
    return mask.astype(dtype)


def make_causal_mask(
    x: Shaped[Array, "*batch length"],
    extra_batch_dims: int = 0,
    dtype: Dtype = jnp.float32,
) -> Shaped[Array, "*extra_and_batch 1 length length"]:
    """Lets every token look at itself and those before it.

    Args:
        x: An array ``[*batch, length]``, of which only the shape counts.
        extra_batch_dims: How many axes of size one to put in front.
        dtype: The dtype of the mask.

    Returns:
        A mask ``[1, ..., 1, *batch, 1, length, length]``, one on and below the
        diagonal, zero above.

    Example:
        >>> nnx.make_causal_mask(jnp.ones(3))
        Array([[[1., 0., 0.],
                [1., 1., 0.],
                [1., 1., 1.]]], dtype=float32)
    """
    positions = jnp.broadcast_to(jnp.arange(x.shape[-1]), x.shape)
    return make_attention_mask(
        positions, positions, jnp.greater_equal, extra_batch_dims, dtype
    )


def combine_masks(
    *masks: Shaped[Array, "*mask_shape"] | None, dtype: Dtype = jnp.float32
) -> Shaped[Array, "*mask_shape"] | None:
    """Lets through what all masks let through.

    Args:
        *masks: Masks of the same rank that broadcast against each other; ``None``
            entries don't count.
        dtype: The dtype of the result.

    Returns:
        The logical AND of the masks, or ``None`` if there is none.

    Raises:
        ValueError: If the masks differ in rank.

    Example:
        >>> is_token = jnp.array([1, 1, 0])
        >>> padding = nnx.make_attention_mask(is_token, is_token)
        >>> nnx.combine_masks(padding, None, nnx.make_causal_mask(is_token))
        Array([[[1., 0., 0.],
                [1., 1., 0.],
                [0., 0., 0.]]], dtype=float32)
    """
    given = [jnp.asarray(mask) for mask in masks if mask is not None]
    if not given:
        return None
    ranks = tuple(mask.ndim for mask in given)
    if len(set(ranks)) > 1:
        raise ValueError(
            f"masks must have same rank, but got {ranks}, with the shapes "
            f"{', '.join(str(mask.shape) for mask in given)}.\n"
            "Give each the axes [*batch, heads, query length, key length]; those of "
            "size one broadcast."
        )
    return functools.reduce(jnp.logical_and, given).astype(dtype)
