"""Rotary position embedding: positions as rotations of queries and keys.

Each pair of features is a point in the plane, rotated by an angle that grows with the
position, each pair at its own speed. Dot products of two vectors then depend on their
distance, not on their places. The two features of a pair are half an embedding
apart, ``x[i]`` and ``x[i + size / 2]``, or neighbours. How fast the pairs turn is the
matter of `rope_scaling`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from graftree.annotations import Array, ArrayLike, Dtype, Inexact, Num
from graftree.core.modules.modules import Module
from graftree.core.variables.variables import Variable
from graftree.nn import attention, rope_scaling
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
        scaling: How the angles are scaled for long texts, with the keys that Hugging
            Face writes into ``rope_scaling``: ``rope_type`` (or ``type``) is
            ``"linear"``, ``"dynamic"``, ``"yarn"``, ``"llama3"``, ``"longrope"`` or
            ``"proportional"``. ``None``: not at all.
        partial_rotary_factor: Which share of the features is rotated, the first ones;
            the others stay as they are.
        interleaved: Whether the features of a pair are neighbours, ``x[2 * i]`` and
            ``x[2 * i + 1]``, as in GPT-J, GLM, Cohere and DeepSeek.
        seq_len: The length that counts for ``"dynamic"`` and ``"longrope"``, the same
            for all calls; set it to decode with a cache, so that all keys in it turn
            alike. ``None``: in each call the largest position of a sequence, plus one,
            as in transformers.

    Attributes:
        cached_sin: Variable, ``[max_seq_len, rotated features / 2]``, or ``None``.
        cached_cos: Likewise.
        scaling: The scaling, checked and hashable, or ``None``.

    Raises:
        ValueError: If one of the two sizes is missing, or the rotated part of
            ``embedding_size`` is not positive and even; if ``scaling`` is of another
            type, has unknown keys or lacks some; if there are to be tables of angles
            that depend on the length, without ``seq_len``.

    Example:
        >>> rope = nnx.RoPE()
        >>> x = jnp.array([[1.0, 0.0]] * 3)  # three times the same pair
        >>> quarters = jnp.arange(3) * jnp.pi / 2
        >>> rope(x, quarters).round().astype(int)
        Array([[ 1,  0],
               [ 0,  1],
               [-1,  0]], dtype=int32)

        Read four times as far as in training:

        >>> rope = nnx.RoPE(scaling={"rope_type": "linear", "factor": 4.0})
        >>> rope(x, 4 * quarters).round().astype(int)
        Array([[ 1,  0],
               [ 0,  1],
               [-1,  0]], dtype=int32)

    References:
        Su et al., 2021, "RoFormer: Enhanced Transformer with Rotary Position
        Embedding", eq. 34; there, pairs are neighbours. Chen et al., 2023, "Extending
        Context Window of Large Language Models via Positional Interpolation"
        (``linear``). Peng et al., 2023, "YaRN", eq. 17 to 22 (``yarn``; ``dynamic``:
        appendix B.1). Dubey et al., 2024, "The Llama 3 Herd of Models" (``llama3``).
        Ding et al., 2024, "LongRoPE", eq. 2 (``longrope``).
    """

    def __init__(
        self,
        theta: float = 10000.0,
        embedding_size: int | None = None,
        max_seq_len: int | None = None,
        *,
        scaling: Mapping[str, Any] | None = None,
        partial_rotary_factor: float = 1.0,
        interleaved: bool = False,
        seq_len: int | None = None,
    ):
        if (embedding_size is None) != (max_seq_len is None):
            raise ValueError(
                "Either both `embedding_size` and `max_seq_len` of RoPE or none of "
                f"them must be provided, got {embedding_size} and {max_seq_len}."
            )
        self.theta = theta
        self.scaling = None if scaling is None else rope_scaling.checked(scaling)
        self.partial_rotary_factor = partial_rotary_factor
        self.interleaved = interleaved
        self.seq_len = seq_len
        sin = cos = None
        if embedding_size is not None:
            self._check_tables()
            dtype = jax.dtypes.canonicalize_dtype(float)
            positions = jnp.arange(max_seq_len)
            pairs, lengths = self._pairs(embedding_size), self._lengths(positions)
            sin, cos = map(Variable, self._tables(positions, pairs, dtype, lengths))
        self.cached_sin = sin
        self.cached_cos = cos

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        layer_type: str | None = None,
        *,
        interleaved: bool | None = None,
        seq_len: int | None = None,
    ) -> RoPE:
        """Makes the rotary positions of a model from its Hugging Face configuration.

        Reads ``rope_theta``, ``rope_scaling`` or ``rope_parameters``,
        ``partial_rotary_factor``, ``max_position_embeddings``,
        ``original_max_position_embeddings``, ``rope_local_base_freq`` and
        ``rope_interleave``.

        Args:
            config: The content of a ``config.json``, or a part that has these entries.
            layer_type: Which layers, if they differ, as in Gemma 3:
                ``"full_attention"`` or ``"sliding_attention"``.
            interleaved: As for the class; ``None``: as ``rope_interleave`` says, or
                else not. Most configurations don't say it.
            seq_len: As for the class.

        Returns:
            A new RoPE, without tables.

        Raises:
            ValueError: If there is no ``rope_theta``; if the layers differ, and
                ``layer_type`` is not one of theirs; if other entries begin with
                ``rope_`` or ``rotary``, or end with ``rope_theta``; or as for the
                class.

        Example:
            >>> config = {
            ...     "max_position_embeddings": 163840,
            ...     "rope_theta": 10000.0,
            ...     "rope_scaling": {
            ...         "type": "yarn",
            ...         "factor": 40,
            ...         "original_max_position_embeddings": 4096,
            ...     },
            ... }
            >>> rope = nnx.RoPE.from_config(config)
            >>> rope.scaling["factor"], rope(jnp.ones((3, 64))).shape
            (40, (3, 64))
        """
        theta, share, scaling = rope_scaling.from_config(config, layer_type)
        if interleaved is None:
            interleaved = bool(config.get("rope_interleave"))
        return cls(
            theta,
            scaling=scaling,
            partial_rotary_factor=share,
            interleaved=interleaved,
            seq_len=seq_len,
        )

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
            ValueError: If the number of rotated features is odd, if the number of
                positions is not the length, or if ``x`` does not fit the tables.
        """
        x = jnp.asarray(x)
        return _rotate(
            x, *self._turns(x, input_positions), interleaved=self.interleaved
        )

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
        turns = self._turns(x, input_positions, heads=1)
        return _rotate(x, *turns, interleaved=self.interleaved)

    def _turns(
        self, x: jax.Array, positions: Any, heads: int = 0, lengths_of: Any = None
    ) -> tuple[jax.Array, jax.Array]:
        """Sine and cosine, of the rank of ``x``, no narrower, one for all heads.

        Args:
            x: ``[*batch, length, size]``, or with heads before the size.
            positions: As for a call.
            heads: The number of axes of heads, 0 or 1.
            lengths_of: The positions that the lengths of the sequences are taken from;
                ``None``: these.
        """
        wide = arithmetic.wide_dtype(arguments.canonicalize_dtype(x), jnp.float32)
        *batch, length = x.shape[: x.ndim - 1 - heads]
        size = x.shape[-1]
        pairs = self._pairs(size)
        if positions is None and self.cached_sin is not None:
            assert self.cached_cos is not None
            self._check_fit(length, size)
            shape = (1,) * len(batch) + (length,) + (1,) * heads + (pairs,)
            tables = self.cached_sin[:length], self.cached_cos[:length]
            sin, cos = (table.reshape(shape).astype(wide) for table in tables)
            return sin, cos
        positions = jnp.arange(length) if positions is None else jnp.asarray(positions)
        if positions.shape[-1:] != (length,) or positions.ndim > len(batch) + 1:
            raise ValueError(
                "`input_positions` and `x` must have the same seq_len, and no more "
                f"batch axes than `x`: got the shapes {positions.shape} and {x.shape}."
            )

        def beside_x(positions: jax.Array) -> jax.Array:
            missing = (1,) * (len(batch) + 1 - positions.ndim)
            return positions.reshape(missing + positions.shape + (1,) * heads)

        positions = beside_x(positions)
        last = positions if lengths_of is None else beside_x(jnp.asarray(lengths_of))
        lengths = self._lengths(last, axis=-1 - heads)
        return self._tables(positions, pairs, wide, lengths)

    def _pairs(self, size: int) -> int:
        """How many pairs of features of vectors are rotated."""
        rotated = int(size * self.partial_rotary_factor)
        if not 0 < rotated <= size or rotated % 2:
            share = self.partial_rotary_factor
            of_it = "" if share == 1 else f" and partial_rotary_factor={share}"
            raise ValueError(
                "`embedding_size`, or the part of it that is rotated, must be positive "
                f"and even, but RoPE got {size}{of_it}."
            )
        return rotated // 2

    def _lengths(self, positions: jax.Array, axis: int = -1) -> jax.Array | None:
        """The lengths that count, of the rank of the positions; ``None``: none."""
        if not rope_scaling.depends_on_length(self.scaling):
            return None
        if self.seq_len is not None:
            return jnp.full((1,) * positions.ndim, self.seq_len)
        return positions.max(axis=axis, keepdims=True, initial=0) + 1

    def _tables(
        self,
        positions: jax.Array,
        pairs: int,
        dtype: Dtype,
        lengths: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        """Sine and cosine for these positions, ``[*positions.shape, pairs]``."""
        settings = {"scaling": self.scaling, "theta": self.theta}
        return _tables(positions, lengths, pairs=pairs, dtype=dtype, **settings)

    def _check_tables(self) -> None:
        """Refuses tables of angles that depend on the length of each sequence."""
        if depends_on_length(self):
            assert self.scaling is not None
            raise ValueError(
                f"The angles of a {self.scaling['rope_type']} scaling depend on the "
                "length of a sequence, so RoPE can't make tables of them.\nFix the "
                "length that counts, RoPE(..., seq_len=...), or give neither "
                "embedding_size nor max_seq_len."
            )

    def _check_fit(self, length: int, size: int) -> None:
        """Refuses inputs that the tables are too short or too narrow for."""
        assert self.cached_sin is not None
        max_length, pairs = self.cached_sin.shape
        if length > max_length or self._pairs(size) != pairs:
            max_size = round(2 * pairs / self.partial_rotary_factor)
            raise ValueError(
                f"RoPE made with max_seq_len={max_length} and embedding_size={max_size}"
                f" got a sequence of length {length}, vectors of size {size}.\n"
                "Make one with a larger max_seq_len, or with neither argument."
            )


@eager.compiled_contraction
def _tables(
    positions: jax.Array,
    lengths: jax.Array | None,
    *,
    scaling: Mapping[str, Any] | None,
    theta: float,
    pairs: int,
    dtype: Dtype,
) -> tuple[jax.Array, jax.Array]:
    """Sine and cosine of the angles, ``[*positions.shape, pairs]``."""
    if scaling is None:
        frequencies = 1.0 / theta ** (jnp.arange(pairs, dtype=dtype) / pairs)
        amplitude = 1.0
    else:
        if lengths is not None:
            lengths = lengths[..., None].astype(dtype)
        frequencies, amplitude = rope_scaling.frequencies(
            scaling, theta, 2 * pairs, lengths
        )
    missing = positions.ndim + 1 - frequencies.ndim
    frequencies = jnp.expand_dims(frequencies.astype(dtype), tuple(range(missing)))
    angles = positions[..., None].astype(dtype) * frequencies
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return (sin, cos) if amplitude == 1 else (amplitude * sin, amplitude * cos)


@eager.compiled_contraction
def _rotate(
    x: jax.Array, sin: jax.Array, cos: jax.Array, *, interleaved: bool
) -> jax.Array:
    """Turns pairs by the angles with this sine and cosine; gives the dtype of ``x``."""
    pairs, size = sin.shape[-1], x.shape[-1]
    if 2 * pairs < size:
        rotated, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
        rotated = _rotate(rotated, sin, cos, interleaved=interleaved)
        return jnp.concatenate([rotated, rest.astype(rotated.dtype)], axis=-1)
    dtype, x = arguments.canonicalize_dtype(x), x.astype(sin.dtype)
    if interleaved:
        first, second = jnp.unstack(x.reshape((*x.shape[:-1], pairs, 2)), axis=-1)
    else:
        first, second = jnp.split(x, 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    if interleaved:
        return jnp.stack(rotated, axis=-1).reshape(x.shape).astype(dtype)
    return jnp.concatenate(rotated, axis=-1).astype(dtype)


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
    key_positions = input_positions if same_length else None
    if isinstance(rope, RoPE) and type(rope) is RoPE:
        query, key = _rotated_alike(rope, query, key, input_positions, key_positions)
    else:
        query = _rotate_heads(rope, query, input_positions)
        key = _rotate_heads(rope, key, key_positions)
    return attention.dot_product_attention(query, key, value, **kwargs)


def _rotated_alike(
    rope: RoPE, query: jax.Array, key: jax.Array, positions: Any, key_positions: Any
) -> tuple[jax.Array, jax.Array]:
    """Rotates queries and keys; the lengths that count are those of the queries."""
    turns = key_turns = rope._turns(query, positions, heads=1)
    if query.shape[-3] != key.shape[-3] or query.dtype != key.dtype:
        lengths_of = jnp.arange(query.shape[-3]) if positions is None else positions
        key_turns = rope._turns(key, key_positions, heads=1, lengths_of=lengths_of)
    # XLA would lay out the products for transposed operands: 4 % of a train step.
    query = _rotate(query, *turns, interleaved=rope.interleaved)
    return query, _rotate(key, *key_turns, interleaved=rope.interleaved)


def _rotate_heads(rope: Callable[..., Any], x: jax.Array, positions: Any) -> jax.Array:
    """Rotates ``[*batch, length, heads, depth]`` over the length, all heads equally."""
    if positions is not None:
        positions = jnp.asarray(positions)[..., None, :]
    return jnp.swapaxes(rope(jnp.swapaxes(x, -2, -3), positions), -2, -3)


def depends_on_length(rope: RoPE) -> bool:
    """Whether the angles of a `RoPE` depend on how long each sequence is."""
    return rope.seq_len is None and rope_scaling.depends_on_length(rope.scaling)
