"""Rotary position embedding: positions as rotations of queries and keys.

Each pair of features is a point in the plane, rotated by an angle that grows with the
position, each pair at its own speed. Dot products of two vectors then depend on their
distance, not on their places. The two features of a pair are half an embedding
apart: ``x[i]`` and ``x[i + size / 2]``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from graftree.annotations import Array, ArrayLike, Dtype, Inexact, Num
from graftree.core.modules.modules import Module
from graftree.core.variables.variables import Variable
from graftree.nn import attention
from graftree.nn.support import arguments, arithmetic, eager


class RoPE(Module):
    """Rotates features by angles that grow with the position.

    With ``angle = position / theta**(2 * i / size)``, the pair ``x1 = x[i]``,
    ``x2 = x[i + size / 2]`` becomes ``x1 * cos(angle) - x2 * sin(angle)``,
    ``x2 * cos(angle) + x1 * sin(angle)``. Hugging Face pairs features the same way, so
    its weights fit unchanged. The angles are computed in float32 or wider, even for
    half-precision inputs.

    Args:
        theta: How slowly the slowest pairs turn.
        embedding_size: Size of the embeddings to make tables for; ``None``: no tables,
            each call computes everything.
        max_seq_len: Number of positions to make tables for; required with
            ``embedding_size``.

    Attributes:
        cached_sin: Variable, ``[max_seq_len, embedding_size / 2]``, or ``None``.
        cached_cos: Likewise.

    Raises:
        ValueError: If one of the two sizes is missing, or ``embedding_size`` is not
            positive and even.

    Example:
        >>> rope = nnx.RoPE()
        >>> x = jnp.array([[1.0, 0.0]] * 3)  # three times the same pair
        >>> quarters = jnp.arange(3) * jnp.pi / 2
        >>> rope(x, quarters).round().astype(int)
        Array([[ 1,  0],
               [ 0,  1],
               [-1,  0]], dtype=int32)

    References:
        Su et al., 2021, "RoFormer: Enhanced Transformer with Rotary Position
        Embedding", eq. 34; there, pairs are neighbours.
    """

    def __init__(
        self,
        theta: float = 10000.0,
        embedding_size: int | None = None,
        max_seq_len: int | None = None,
    ):
        if (embedding_size is None) != (max_seq_len is None):
            raise ValueError(
                "Either both `embedding_size` and `max_seq_len` of RoPE or none of "
                f"them must be provided, got {embedding_size} and {max_seq_len}."
            )
        sin = cos = None
        if embedding_size is not None:
            _check_size(embedding_size)
            dtype = jax.dtypes.canonicalize_dtype(float)
            tables = _tables(
                jnp.arange(max_seq_len), size=embedding_size, theta=theta, dtype=dtype
            )
            sin, cos = map(Variable, tables)
        self.theta = theta
        self.cached_sin = sin
        self.cached_cos = cos

    def __call__(
        self,
        x: Num[ArrayLike, "*batch length size"],
        input_positions: Num[ArrayLike, "*positions length"] | None = None,
    ) -> Inexact[Array, "*batch length size"]:
        """Rotates each vector of ``x`` according to its position.

        Args:
            x: Vectors of even size, ``[*batch, length, size]``.
            input_positions: The positions, ``[length]``, or broadcastable to
                ``[*batch, length]``; they may be fractional or negative, and are not
                looked up in the tables. ``None``: ``0 .. length - 1``.

        Returns:
            A new array of the shape of ``x``, in its dtype; for integers in float32.

        Raises:
            ValueError: If the size is odd, if the number of positions is not the
                length, or if ``x`` does not fit the tables.
        """
        x = jnp.asarray(x)
        return _rotate(x, *self._turns(x, input_positions))

    def rotate_heads(
        self,
        x: Num[ArrayLike, "*batch length heads size"],
        input_positions: Num[ArrayLike, "*positions length"] | None = None,
    ) -> Inexact[Array, "*batch length heads size"]:
        """Rotates queries or keys in the layout of attention, all heads equally.

        Like calling with length and heads transposed, but without transposing.

        Args:
            x: Vectors of even size, ``[*batch, length, heads, size]``.
            input_positions: The positions, ``[length]`` or ``[*batch, length]``.
                ``None``: ``0 .. length - 1``.

        Returns:
            A new array of the shape of ``x``, in its dtype; for integers in float32.

        Raises:
            ValueError: As for a call.

        Example:
            >>> x = jax.random.normal(jax.random.key(0), (3, 2, 8))
            >>> transposed = nnx.RoPE()(jnp.swapaxes(x, 0, 1))
            >>> jnp.array_equal(
            ...     nnx.RoPE().rotate_heads(x), jnp.swapaxes(transposed, 0, 1)
            ... )
            Array(True, dtype=bool)
        """
        x = jnp.asarray(x)
        return _rotate(x, *self._turns(x, input_positions, heads=1))

    def _turns(
        self, x: jax.Array, positions: Any, heads: int = 0
    ) -> tuple[jax.Array, jax.Array]:
        """Sine and cosine, of the rank of ``x``, no narrower, one for all heads.

        Args:
            x: ``[*batch, length, size]``, or with heads before the size.
            positions: As for a call.
            heads: The number of axes of heads, 0 or 1.
        """
        wide = arithmetic.wide_dtype(arguments.canonicalize_dtype(x), jnp.float32)
        *batch, length = x.shape[: x.ndim - 1 - heads]
        size = x.shape[-1]
        _check_size(size)
        if positions is None and self.cached_sin is not None:
            assert self.cached_cos is not None
            _check_fit(self.cached_sin.shape, length, size)
            shape = (1,) * len(batch) + (length,) + (1,) * heads + (size // 2,)
            tables = self.cached_sin[:length], self.cached_cos[:length]
            sin, cos = (table.reshape(shape).astype(wide) for table in tables)
            return sin, cos
        positions = jnp.arange(length) if positions is None else jnp.asarray(positions)
        if positions.shape[-1:] != (length,) or positions.ndim > len(batch) + 1:
            raise ValueError(
                "`input_positions` and `x` must have the same seq_len, and no more "
                f"batch axes than `x`: got the shapes {positions.shape} and {x.shape}."
            )
        missing = (1,) * (len(batch) + 1 - positions.ndim)
        positions = positions.reshape(missing + positions.shape + (1,) * heads)
        return _tables(positions, size=size, theta=self.theta, dtype=wide)


def _check_size(size: int) -> None:
    if size <= 0 or size % 2:
        raise ValueError(
            f"`embedding_size` must be positive and even, but RoPE got {size}."
        )


def _check_fit(table: tuple[int, ...], length: int, size: int) -> None:
    """Refuses inputs that the tables are too short or too narrow for."""
    max_length, max_size = table[-2], 2 * table[-1]
    if length > max_length or size != max_size:
        raise ValueError(
            f"RoPE made with max_seq_len={max_length} and embedding_size={max_size} "
            f"got a sequence of length {length}, vectors of size {size}.\n"
            "Make one with a larger max_seq_len, or with neither argument."
        )


@eager.compiled_contraction
def _tables(
    positions: jax.Array, *, size: int, theta: float, dtype: Dtype
) -> tuple[jax.Array, jax.Array]:
    """Sine and cosine of the angles, ``[*positions.shape, size / 2]``."""
    pairs = size // 2
    frequencies = 1.0 / theta ** (jnp.arange(pairs, dtype=dtype) / pairs)
    frequencies = jnp.expand_dims(frequencies, tuple(range(positions.ndim)))
    angles = positions[..., None].astype(dtype) * frequencies
    return jnp.sin(angles), jnp.cos(angles)


@eager.compiled_contraction
def _rotate(x: jax.Array, sin: jax.Array, cos: jax.Array) -> jax.Array:
    """Turns pairs by the angles with this sine and cosine; gives the dtype of ``x``."""
    first, second = jnp.split(x.astype(sin.dtype), 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(arguments.canonicalize_dtype(x))


def dot_product_attention_with_rope(
    query: Num[ArrayLike, "*batch queries heads depth"],
    key: Num[ArrayLike, "*batch keys kv_heads depth"],
    value: Num[ArrayLike, "*batch keys v_heads v_depth"],
    *,
    rope: Callable[..., Any],
    input_positions: Num[ArrayLike, "*positions queries"] | None = None,
    **kwargs: Any,
) -> Inexact[Array, "*batch queries heads v_depth"]:
    """Computes `dot_product_attention` of rotated queries and keys.

    Made to be the ``attention_fn`` of a `MultiHeadAttention`, with ``rope`` filled in
    by ``functools.partial``. While decoding, it passes the positions of the queries.

    Args:
        query: ``[*batch, queries, heads, depth]``, ``depth`` even.
        key: ``[*batch, keys, kv_heads, depth]``.
        value: ``[*batch, keys, v_heads, v_depth]``.
        rope: A `RoPE`. Another callable, or a subclass, gets
            ``[*batch, heads, length, depth]`` and positions that broadcast to
            ``[*batch, heads, length]``, or ``None``.
        input_positions: Positions, ``[queries]`` or ``[*batch, queries]``: of queries
            and keys if there are equally many; otherwise of the queries, and the keys
            have ``0, 1, ...``. ``None``: both have ``0, 1, ...``.
        **kwargs: Passed on to `dot_product_attention`.

    Returns:
        An array ``[*batch, queries, heads, v_depth]``.

    Raises:
        ValueError: As `RoPE` and `dot_product_attention`.

    Example:
        >>> import functools
        >>> attention_fn = functools.partial(
        ...     nnx.dot_product_attention_with_rope, rope=nnx.RoPE()
        ... )
        >>> layer = nnx.MultiHeadAttention(
        ...     2, 8, attention_fn=attention_fn, decode=False, rngs=nnx.Rngs(0)
        ... )
        >>> x = jax.random.normal(jax.random.key(1), (3, 8))
        >>> y = layer(x, is_causal=True)
        >>> shifted = layer(x, is_causal=True, input_positions=jnp.array([7, 8, 9]))
        >>> jnp.allclose(y, shifted, atol=1e-5)  # only distances count
        Array(True, dtype=bool)
    """
    query, key = arguments.as_array(query), arguments.as_array(key)
    # Otherwise positions belong to the queries only; the keys have 0, 1, ...
    same_length = query.shape[-3] == key.shape[-3]
    if type(rope) is RoPE and same_length and query.dtype == key.dtype:
        turns = rope._turns(query, input_positions, heads=1)
        query, key = _rotate(query, *turns), _rotate(key, *turns)
    else:
        query = _rotate_heads(rope, query, input_positions)
        key = _rotate_heads(rope, key, input_positions if same_length else None)
    return attention.dot_product_attention(query, key, value, **kwargs)


def _rotate_heads(rope: Callable[..., Any], x: jax.Array, positions: Any) -> jax.Array:
    """Rotates ``[*batch, length, heads, depth]`` over the length, all heads equally."""
    if type(rope) is RoPE:
        # XLA would lay out the products for transposed operands: 4 % of a train step.
        return rope.rotate_heads(x, positions)
    if positions is not None:
        positions = jnp.asarray(positions)[..., None, :]
    return jnp.swapaxes(rope(jnp.swapaxes(x, -2, -3), positions), -2, -3)
