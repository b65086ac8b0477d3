"""Multi-head latent attention: keys and values as products of a small vector.

For each token a *latent* vector is computed, and one key, rotated by the position, that
all heads share. The rest of each head's keys, and its values, are products of the
latent with `kv_up`. A cache keeps latents and shared keys only. Attention needs no
keys of heads: ``query . (latent @ up) = (query @ up^T) . latent``, so the queries are
brought to the space of latents (they *absorb* the product), and so are the values.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from graftree.annotations import (
    Array,
    ArrayLike,
    Dtype,
    Inexact,
    Initializer,
    Int,
    Num,
    PrecisionLike,
    Shaped,
)
from graftree.core.modules.modules import Module
from graftree.core.objects import attributes
from graftree.core.rng.streams import Rngs, RngStream
from graftree.nn import attention, compute_dtypes, linear, normalization
from graftree.nn.attention_patterns import AttentionPattern, KeysAndValues, Rule
from graftree.nn.caches import KeyValueCache
from graftree.nn.support import arguments


class MultiHeadLatentAttention(Module):
    """Causal attention whose keys and values come from one small vector per token.

    The sizes have their names in the ``config.json`` of DeepSeek-V2 and V3. A key of a
    head is ``[latent @ up, rotated]``, where ``rotated`` is the same in all heads.

    Args:
        num_heads: Number of heads.
        in_features: Size of the last axis of inputs and outputs.
        q_lora_rank: The size of the vector that queries are computed from, per token;
            ``None``: they are computed from the inputs.
        kv_lora_rank: The size of the latent of keys and values.
        qk_nope_head_dim: The features of a query or key that are not rotated.
        qk_rope_head_dim: Those that are.
        v_head_dim: The size of a head of values.
        rope: Rotates, a `RoPE`; called as ``rope.rotate_heads(x, positions)``.
        scale: The factor of the dot products; ``None``: ``1 / sqrt(qk_nope_head_dim +
            qk_rope_head_dim)``.
        epsilon: That of the norms.
        use_bias: Whether ``query_down``, ``kv_down`` and ``out`` have biases.
        dtype: The dtype of the computation and the output; ``None``: inferred from
            inputs and Params.
        param_dtype: The dtype in which the Params are stored.
        precision: Passed to the contractions.
        kernel_init: Initializer of the kernels.
        rngs: Gives keys for the parts, in the order of the attributes. With dropout,
            its stream ``dropout`` is forked last.
        broadcast_dropout: Whether all batch entries and heads drop the same weights.
        dropout_rate: The probability that an attention weight is dropped, in
            ``[0, 1)``.
        deterministic: Whether to drop nothing; ``None``: each call must say.
        keep_rngs: Whether the layer has its own stream for dropout; else calls give
            one.
        kernel_metadata: Metadata of the Params that make heads, ``[..., num_heads,
            size]``: the kernel of ``query``, and ``kv_up``.
        down_kernel_metadata: That of the kernels of ``query_down`` and ``kv_down``.
        out_kernel_metadata: That of the kernel of ``out``.
        bias_metadata: Metadata of the biases.

    Attributes:
        query_down, query_norm: Linear and RMSNorm, the vectors of queries, or ``None``.
        query: LinearGeneral, to ``[num_heads, qk_nope_head_dim + qk_rope_head_dim]``.
        kv_down: Linear, to the latent followed by the shared key.
        kv_norm: RMSNorm of the latent.
        kv_up: Param, ``[kv_lora_rank, num_heads, qk_nope_head_dim + v_head_dim]``.
        out: LinearGeneral, kernel ``[num_heads, v_head_dim, in_features]``.
        rngs: The layer's own RngStream for dropout, or ``None``.

    Raises:
        AttributeError: If ``rngs`` has no stream ``params``, or none for dropout.

    Example:
        >>> layer = nnx.MultiHeadLatentAttention(
        ...     4, 16, kv_lora_rank=6, qk_nope_head_dim=8, qk_rope_head_dim=4,
        ...     v_head_dim=8, rope=nnx.RoPE(), rngs=nnx.Rngs(0)
        ... )
        >>> x = jax.random.normal(jax.random.key(1), (1, 5, 16))
        >>> cache = layer.make_cache(1, 5)  # 6 + 4 numbers for a token, not 4 * 20
        >>> cache.value.shape, cache.key.shape
        ((1, 5, 1, 6), (1, 5, 1, 4))
        >>> y = layer(x, positions=jnp.arange(5)[None], cache=cache)
        >>> jnp.allclose(y, layer(x), atol=1e-5)
        Array(True, dtype=bool)

    References:
        DeepSeek-AI, 2024, "DeepSeek-V2", section 2.1, eq. 9 to 19.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        q_lora_rank: int | None = None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        rope: Any,
        scale: float | None = None,
        epsilon: float = 1e-6,
        use_bias: bool = False,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = linear.default_kernel_init,
        rngs: Rngs,
        broadcast_dropout: bool = True,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        keep_rngs: bool = True,
        kernel_metadata: Mapping[str, Any] = arguments.NO_METADATA,
        down_kernel_metadata: Mapping[str, Any] = arguments.NO_METADATA,
        out_kernel_metadata: Mapping[str, Any] = arguments.NO_METADATA,
        bias_metadata: Mapping[str, Any] = arguments.NO_METADATA,
    ):
        dtypes = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        options = {"precision": precision, "kernel_init": kernel_init, **dtypes}
        with_bias = {"use_bias": use_bias, "bias_metadata": bias_metadata, **options}
        new_down = functools.partial(
            linear.Linear, kernel_metadata=down_kernel_metadata, **with_bias
        )
        new_heads = functools.partial(
            linear.LinearGeneral,
            use_bias=False,
            kernel_metadata=kernel_metadata,
            **options,
        )
        self.num_heads = num_heads
        self.in_features = in_features
        self.kv_lora_rank = kv_lora_rank
        self.qk_nope_head_dim = qk_nope_head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.v_head_dim = v_head_dim
        self.scale = scale
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.broadcast_dropout = broadcast_dropout
        self.dropout_rate = dropout_rate
        self.deterministic = deterministic
        self.rope = attributes.data(rope)
        self.query_down = self.query_norm = attributes.data(None)
        if q_lora_rank is not None:
            self.query_down = new_down(in_features, q_lora_rank)
            self.query_norm = normalization.RMSNorm(
                q_lora_rank, epsilon=epsilon, **dtypes
            )
        self.query = new_heads(
            in_features if q_lora_rank is None else q_lora_rank,
            (num_heads, qk_nope_head_dim + qk_rope_head_dim),
        )
        self.kv_down = new_down(in_features, kv_lora_rank + qk_rope_head_dim)
        self.kv_norm = normalization.RMSNorm(kv_lora_rank, epsilon=epsilon, **dtypes)
        # A Param of its own, because both of its parts meet queries and values alone.
        heads = (num_heads, qk_nope_head_dim + v_head_dim)
        self.kv_up = new_heads(kv_lora_rank, heads).kernel
        self.out = linear.LinearGeneral(
            (num_heads, v_head_dim),
            in_features,
            axis=(-2, -1),
            kernel_metadata=out_kernel_metadata,
            **with_bias,
        )
        has_stream = keep_rngs and dropout_rate > 0
        self.rngs = rngs.dropout.fork() if has_stream else attributes.data(None)

    def __call__(
        self,
        inputs: Num[ArrayLike, "*batch length in_features"],
        *,
        positions: Num[ArrayLike, "*positions length"] | None = None,
        cache: KeyValueCache | None = None,
        segment_ids: Int[ArrayLike, "*segments length"] | None = None,
        prefix_lengths: Int[ArrayLike, "*of_each"] | None = None,
        mask: Shaped[ArrayLike, "*mask_shape"] | Rule | None = None,
        deterministic: bool | None = None,
        rngs: Rngs | RngStream | None = None,
    ) -> Inexact[Array, "*batch length in_features"]:
        """Attends from each token to itself and those before.

        Args:
            inputs: ``[*batch, length, in_features]``.
            positions: Where in its sequence each token is, ``[length]`` or ``[*batch,
                length]``; needed with a cache. ``None``: 0, 1, ... Without a cache they
                hide no token: padding before a sequence needs a ``mask``.
            cache: What `make_cache` returns; the call's tokens are added to it.
            segment_ids: As in `nnx.decoding.attend`, like the next two.
            prefix_lengths: How many first tokens of a sequence see each other.
            mask: Which of the tokens a token sees.
            deterministic: Overrides the attribute, if not ``None``.
            rngs: Where the key for dropout comes from; ``None``: the layer's own
                stream.

        Returns:
            An array of the shape of the inputs.

        Raises:
            ValueError: As `nnx.decoding.attend`; or, with dropout, if nothing says
                whether to be deterministic, or where random keys come from.
        """
        stream = arguments.dropout_stream(self, deterministic, rngs)
        latent, shared = self._latent(arguments.as_array(inputs), positions)
        query, rotated = self._queries(arguments.as_array(inputs), positions)
        up_key, up_value = self._up(latent)
        tokens: tuple[Any, Any] = (positions, segment_ids)
        keys = KeysAndValues(shared, latent, *tokens)
        pattern = AttentionPattern(*tokens, prefix_lengths, mask=mask)
        state = () if cache is None else vars(cache).values()
        with arguments.undone_on_failure(stream, *state):
            if cache is None:
                key = self._product("...kxr,rhd->...khd", latent, up_key)
                value = self._product("...kxr,rhd->...khd", latent, up_value)
                shared = jnp.broadcast_to(
                    shared, (*key.shape[:-1], self.qk_rope_head_dim)
                )
                key = jnp.concatenate([key, shared], axis=-1)
            else:
                query = self._product("...qhd,rhd->...qhr", query, up_key)
                keys, pattern = cache.add(query, keys, pattern)
                value = keys.value
                key = jnp.concatenate([value, keys.key], axis=-1)
            query = jnp.concatenate([query, rotated], axis=-1)
            size = self.qk_nope_head_dim + self.qk_rope_head_dim
            heads = attention.dot_product_attention(
                query,
                key,
                value,
                scale=size**-0.5 if self.scale is None else self.scale,
                dropout_rng=None if stream is None else stream(),
                dropout_rate=self.dropout_rate,
                broadcast_dropout=self.broadcast_dropout,
                deterministic=stream is None,
                dtype=self.dtype,
                precision=self.precision,
                **pattern.options(query, keys),
            )
            if cache is not None:
                heads = self._product("...qhr,rhd->...qhd", heads, up_value)
            return self.out(heads)

    def _queries(
        self, inputs: jax.Array, positions: Any
    ) -> tuple[jax.Array, jax.Array]:
        """The parts of queries that are not rotated, and that are."""
        if self.query_down is not None:
            assert self.query_norm is not None
            inputs = self.query_norm(self.query_down(inputs))
        query, rotated = jnp.split(self.query(inputs), [self.qk_nope_head_dim], axis=-1)
        return query, self.rope.rotate_heads(rotated, positions)

    def _latent(self, inputs: jax.Array, positions: Any) -> tuple[jax.Array, jax.Array]:
        """The latents and the shared keys, each as one head."""
        x = self.kv_down(inputs)
        latent, shared = jnp.split(x, [self.kv_lora_rank], axis=-1)
        shared = self.rope.rotate_heads(shared[..., None, :], positions)
        return self.kv_norm(latent)[..., None, :], shared

    def _up(self, latent: jax.Array) -> list[jax.Array]:
        """The parts of ``kv_up`` for keys and values, in the dtype of the product."""
        up = self.kv_up[...]
        dtype = arguments.canonicalize_dtype(latent, up, dtype=self.dtype)
        return jnp.split(up.astype(dtype), [self.qk_nope_head_dim], axis=-1)

    def _product(self, formula: str, x: jax.Array, up: jax.Array) -> jax.Array:
        return jnp.einsum(formula, x.astype(up.dtype), up, precision=self.precision)

    def make_cache(
        self,
        batch: int,
        max_length: int,
        *,
        dtype: Dtype | None = None,
        packed: bool = False,
    ) -> KeyValueCache:
        """Makes an empty cache: its values are the latents, its keys the shared keys.

        Args:
            batch: The number of sequences, or of rows of them.
            max_length: The number of tokens that each has room for.
            dtype: The dtype in which they are kept; ``None``:
                `nnx.precision.compute_dtype` of the layer.
            packed: Whether a row holds several sequences.
        """
        return KeyValueCache(
            batch,
            max_length,
            kv_heads=1,
            head_dim=self.qk_rope_head_dim,
            value_head_dim=self.kv_lora_rank,
            dtype=compute_dtypes.compute_dtype(self) if dtype is None else dtype,
            packed=packed,
        )
