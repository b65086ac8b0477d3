"""A table of vectors, looked up by integer and usable as an output projection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from graftree.annotations import ArrayLike, Dtype, Initializer, PromoteDtypeFn
from graftree.core.modules.modules import Module
from graftree.core.objects import methods
from graftree.core.rng.streams import Rngs
from graftree.nn import initializers
from graftree.nn.support import arguments, parameters

if TYPE_CHECKING:
    from jaxtyping import Array, Inexact, Integer, Num

default_embed_init = initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)
"""The initializer of embeddings: normal, standard deviation ``1 / sqrt(features)``."""


class Embed(Module):
    """A table with one vector per integer.

    Args:
        num_embeddings: Number of rows of the table.
        features: Size of each row.
        dtype: The dtype of the result; ``None``: that of the table.
        param_dtype: The dtype in which the table is stored.
        embedding_init: Initializer of ``embedding``.
        promote_dtype: Called as ``promote_dtype((embedding,), dtype=dtype,
            inexact=False)`` by a look-up, and as ``promote_dtype((query, embedding),
            dtype=dtype)`` by `attend`.
        rngs: Gives one key to ``embedding``.
        embedding_metadata: Metadata of the Param ``embedding``.

    Attributes:
        embedding: Param, ``[num_embeddings, features]``.

    Raises:
        AttributeError: If ``rngs`` has no stream ``params``.

    Example:
        >>> layer = nnx.Embed(num_embeddings=3, features=2, rngs=nnx.Rngs(0))
        >>> layer.embedding[...] = jnp.array([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])
        >>> layer(jnp.array([2, 0]))
        Array([[4., 5.],
               [0., 1.]], dtype=float32)
        >>> layer.attend(jnp.array([1.0, 0.0]))
        Array([0., 2., 4.], dtype=float32)
    """

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        embedding_init: Initializer = default_embed_init,
        promote_dtype: PromoteDtypeFn = arguments.promote_dtype,
        rngs: Rngs,
        embedding_metadata: Mapping[str, Any] = parameters.NO_METADATA,
    ):
        shape = (num_embeddings, features)
        self.embedding = parameters.new_param(
            rngs, embedding_init, shape, param_dtype, embedding_metadata
        )
        self.num_embeddings = num_embeddings
        self.features = features
        self.dtype = self.embedding.dtype if dtype is None else dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype

    def __call__(
        self, inputs: Integer[ArrayLike, "*shape"], out_sharding: Any = None
    ) -> Num[Array, "*shape features"]:
        """Looks up rows by number.

        Negative numbers count from the end. A number outside the table gives a row of
        NaN; but a table with a single row gives that row for every number.

        Args:
            inputs: Integers, signed or unsigned, of any shape.
            out_sharding: The sharding of the result on a mesh with explicit axes;
                ``None``: the one that follows from the operands.

        Returns:
            An array ``[*inputs.shape, features]`` in ``dtype``.

        Raises:
            ValueError: If ``inputs`` holds numbers other than integers.
            TypeError: If ``inputs`` is not numeric.
        """
        numbers = arguments.as_array(inputs)
        if not jnp.issubdtype(numbers.dtype, jnp.integer):
            raise ValueError("Input type must be an integer or unsigned integer.")
        (embedding,) = self.promote_dtype(
            (self.embedding[...],), dtype=self.dtype, inexact=False
        )
        if self.num_embeddings == 1:
            return jnp.broadcast_to(
                embedding.reshape((1,) * numbers.ndim + (self.features,)),
                (*numbers.shape, self.features),
                **arguments.if_set(out_sharding=out_sharding),
            )
        if out_sharding is None:
            return jnp.take(embedding, numbers, axis=0)
        return embedding.at[numbers].get(mode="fill", out_sharding=out_sharding)

    @methods.named
    def attend(
        self, query: Num[ArrayLike, "*batch features"], out_sharding: Any = None
    ) -> Inexact[Array, "*batch num_embeddings"]:
        """Multiplies ``query`` with every row, as tied output layers do.

        Args:
            query: ``[*batch, features]``.
            out_sharding: The sharding of the result on a mesh with explicit axes;
                ``None``: the one that follows from the operands.

        Returns:
            The dot products, ``[*batch, num_embeddings]``.

        Raises:
            TypeError: If the last axis of ``query`` is not ``features`` long, or
                ``query`` is not numeric.

        References:
            Press and Wolf, 2017, "Using the Output Embedding to Improve Language
            Models".
        """
        operands = (arguments.as_array(query), self.embedding[...])
        x, embedding = self.promote_dtype(operands, dtype=self.dtype)
        axes = (((x.ndim - 1,), (1,)), ((), ()))
        options = arguments.if_set(out_sharding=out_sharding)
        return jax.lax.dot_general(x, embedding, axes, **options)
