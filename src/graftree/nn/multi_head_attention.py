"""Attention with learned projections, the same layer in training and decoding.

A call checks its input, then computes queries, keys and values, adds those of a cache,
and attends to them as an `AttentionPattern` says. A call that fails leaves caches and
random streams as they were. A cache is an argument, a `KeyValueCache`, or one that
belongs to the layer (`own_caches.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from graftree.annotations import (
    Array,
    ArrayLike,
    DotGeneralT,
    Dtype,
    Inexact,
    Initializer,
    Int,
    Num,
    PrecisionLike,
    PromoteDtypeFn,
    Shape,
    Shaped,
)
from graftree.core.modules.modules import Module
from graftree.core.objects import attributes
from graftree.core.rng.streams import Rngs, RngStream
from graftree.core.variables.kinds import Cache, Param
from graftree.nn import attention, compute_dtypes, linear, normalization, own_caches
from graftree.nn.attention_patterns import AttentionPattern, KeysAndValues, Rule
from graftree.nn.caches import KeyValueCache
from graftree.nn.support import arguments


class MultiHeadAttention(Module):
    """Lets each token gather information from others, in several heads at once.

    Inputs are projected to queries, keys and values per head; `dot_product_attention`
    averages the values; ``out`` mixes the heads. Each call says whether it decodes
    (see `__call__`), unless ``decode`` is given here.

    Args:
        num_heads: Number of query heads.
        in_features: Size of the last axis of the queries' inputs.
        qkv_features: Size of all query heads together; ``None``: ``in_features``.
        out_features: Size of the last axis of the outputs; ``None``: ``in_features``.
        num_kv_heads: Number of key and value heads, a divisor of ``num_heads``; fewer
            heads make a smaller cache. ``None``: ``num_heads``.
        in_kv_features: Size of the last axis of the inputs of keys and values;
            ``None``: ``in_features``.
        dtype: The dtype of the computation and the output; ``None``: inferred from
            inputs and Params.
        param_dtype: The dtype in which the Params are stored.
        broadcast_dropout: Whether all batch entries and heads drop the same weights.
        dropout_rate: The probability that an attention weight is dropped, in
            ``[0, 1)``.
        deterministic: Whether to drop nothing; ``None``: each call must say.
        precision: Passed to the contractions.
        kernel_init: Initializer of the kernels.
        out_kernel_init: That of the kernel of ``out``; ``None``: ``kernel_init``.
        bias_init: Initializer of the biases.
        out_bias_init: That of the bias of ``out``; ``None``: ``bias_init``.
        use_bias: Whether the projections have biases; or the names of those that have,
            such as ``("query", "value", "out")``.
        attention_fn: Called like `dot_product_attention`, with keywords. To set options
            of that function, fill them in: ``functools.partial(
            nnx.dot_product_attention, logits_soft_cap=50.0)``.
        decode: Whether calls decode; ``None``: each call must say.
        normalize_qk: Whether queries and keys are normalized, by LayerNorms without
            biases; or the class of the layers to normalize them, such as `RMSNorm`.
            Fill in options with ``functools.partial(nnx.RMSNorm, epsilon=1e-6)``.
        qkv_promote_dtype: The ``promote_dtype`` of ``query``, ``key`` and ``value``.
        out_promote_dtype: That of ``out``.
        ln_promote_dtype: That of the layers that normalize.
        qkv_dot_general, out_dot_general: The contractions of these layers.
        qkv_dot_general_cls, out_dot_general_cls: Make them, new ones in each call.
        rngs: Gives keys for ``query``, ``key``, ``value``, the LayerNorms and ``out``,
            for the kernel first, then for the bias. With dropout, its stream
            ``dropout`` is forked last.
        keep_rngs: Whether the layer has its own stream for dropout; else calls give
            one.
        kernel_metadata: Metadata of the kernels.
        out_kernel_metadata: That of the kernel of ``out``; empty: ``kernel_metadata``.
        bias_metadata: Metadata of the biases.
        out_bias_metadata: That of the bias of ``out``; empty: ``bias_metadata``.
        query_ln_scale_metadata, key_ln_scale_metadata: Those of the layers that
            normalize.
        normalize_qk_axes: The axes of ``[*batch, length, heads, head_dim]`` that are
            normalized together: -1, each head by itself, or ``(-2, -1)``, all heads.
        rope: Rotates queries and keys by their positions, a `RoPE`; called as
            ``rope.rotate_heads(query, positions)``.
        sliding_window: How many tokens a token sees, itself included; ``None``: all.
        logits_soft_cap: As in `dot_product_attention`, like the next one.
        scale: The factor of the dot products; ``None``: ``1 / sqrt(head_dim)``. Or a
            function that takes the positions of queries and returns a factor for each,
            as in Llama 4.
        use_sinks: Whether each query head has a learned logit without a value.
        value_head_dim: The size of a head of values; ``None``: ``head_dim``.

    Attributes:
        query: LinearGeneral, kernel ``[in_features, num_heads, head_dim]``.
        key: LinearGeneral, kernel ``[in_kv_features, num_kv_heads, head_dim]``.
        value: LinearGeneral, kernel ``[in_kv_features, num_kv_heads, value_head_dim]``.
        query_ln, key_ln: LayerNorm of ``head_dim`` features, or another layer, or
            ``None``.
        out: LinearGeneral, kernel ``[num_heads, value_head_dim, out_features]``.
        sinks: Param, ``[num_heads]``, zeros at first, or ``None``.
        head_dim: ``qkv_features / num_heads``.
        rngs: The layer's own RngStream for dropout, or ``None``.
        cached_key, cached_value: Cache, ``[*batch, max_length, num_kv_heads, head_dim
            or value_head_dim]``, or ``None``; made by `init_cache`.
        cache_index: Cache, an int32: how many tokens have been decoded.

    Raises:
        ValueError: If ``num_heads`` does not divide ``qkv_features``, if
            ``num_kv_heads`` does not divide ``num_heads``, if ``use_bias`` names
            anything else, or if both ``rope`` and ``attention_fn`` take positions.
        AttributeError: If ``rngs`` has no stream ``params``, or none for dropout.

    Example:
        >>> layer = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
        >>> x = jax.random.normal(jax.random.key(1), (4, 3, 8))
        >>> y = layer(x, is_causal=True)
        >>> layer.init_cache((4, 3, 8))
        >>> tokens = [layer(x[:, t : t + 1], decode=True) for t in range(3)]
        >>> jnp.allclose(jnp.concatenate(tokens, axis=1), y, atol=1e-5)
        Array(True, dtype=bool)

        The attention of Qwen3, in training and with a cache of `nnx.decoding`:

        >>> layer = nnx.MultiHeadAttention(
        ...     4, 8, 16, num_kv_heads=2, use_bias=False, normalize_qk=nnx.RMSNorm,
        ...     rope=nnx.RoPE(), decode=False, rngs=nnx.Rngs(0)
        ... )
        >>> y = layer(x, is_causal=True)
        >>> cache, positions = layer.make_cache(4, 3), jnp.tile(jnp.arange(3), (4, 1))
        >>> jnp.allclose(layer(x, positions=positions, cache=cache), y, atol=1e-5)
        Array(True, dtype=bool)

    References:
        Vaswani et al., 2017, "Attention Is All You Need", section 3.2.2. Henry et al.,
        2020, "Query-Key Normalization for Transformers".
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        broadcast_dropout: bool = True,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        precision: PrecisionLike = None,
        kernel_init: Initializer = linear.default_kernel_init,
        out_kernel_init: Initializer | None = None,
        bias_init: Initializer = linear.default_bias_init,
        out_bias_init: Initializer | None = None,
        use_bias: bool | Collection[str] = True,
        attention_fn: Callable[..., Any] = attention.dot_product_attention,
        decode: bool | None = None,
        normalize_qk: bool | Callable[..., Any] = False,
        qkv_promote_dtype: PromoteDtypeFn = arguments.promote_dtype,
        out_promote_dtype: PromoteDtypeFn = arguments.promote_dtype,
        ln_promote_dtype: PromoteDtypeFn = arguments.promote_dtype,
        qkv_dot_general: DotGeneralT | None = None,
        out_dot_general: DotGeneralT | None = None,
        qkv_dot_general_cls: Callable[[], DotGeneralT] | None = None,
        out_dot_general_cls: Callable[[], DotGeneralT] | None = None,
        rngs: Rngs,
        keep_rngs: bool = True,
        kernel_metadata: Mapping[str, Any] = arguments.NO_METADATA,
        out_kernel_metadata: Mapping[str, Any] = arguments.NO_METADATA,
        bias_metadata: Mapping[str, Any] = arguments.NO_METADATA,
        out_bias_metadata: Mapping[str, Any] = arguments.NO_METADATA,
        query_ln_scale_metadata: Mapping[str, Any] = arguments.NO_METADATA,
        key_ln_scale_metadata: Mapping[str, Any] = arguments.NO_METADATA,
        normalize_qk_axes: int | Sequence[int] = -1,
        rope: Any = None,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
        scale: float | Callable[[jax.Array], Any] | None = None,
        use_sinks: bool = False,
        value_head_dim: int | None = None,
    ):
        qkv_features = in_features if qkv_features is None else qkv_features
        out_features = in_features if out_features is None else out_features
        in_kv_features = in_features if in_kv_features is None else in_kv_features
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        arguments.check_sizes(
            self,
            num_heads=num_heads,
            in_features=in_features,
            qkv_features=qkv_features,
            out_features=out_features,
            num_kv_heads=num_kv_heads,
            in_kv_features=in_kv_features,
        )
        _check_heads(num_heads, num_kv_heads, qkv_features)
        has_bias = _has_bias(use_bias)
        if rope is not None and attention.takes_positions(attention_fn):
            raise ValueError(
                "MultiHeadAttention got both rope= and an attention_fn that takes "
                "input_positions, which would rotate twice.\nPass rope= only."
            )
        self.num_heads = num_heads
        self.in_features = in_features
        self.qkv_features = qkv_features
        self.out_features = out_features
        self.in_kv_features = in_kv_features
        self.num_kv_heads = num_kv_heads
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.broadcast_dropout = broadcast_dropout
        self.dropout_rate = dropout_rate
        self.deterministic = deterministic
        self.precision = precision
        self.use_bias = use_bias if isinstance(use_bias, bool) else tuple(use_bias)
        self.attention_fn = attention_fn
        self.decode = decode
        self.normalize_qk = normalize_qk is not False
        self.qkv_promote_dtype = qkv_promote_dtype
        self.out_promote_dtype = out_promote_dtype
        self.ln_promote_dtype = ln_promote_dtype
        self.qkv_dot_general = qkv_dot_general
        self.out_dot_general = out_dot_general
        self.qkv_dot_general_cls = qkv_dot_general_cls
        self.out_dot_general_cls = out_dot_general_cls
        self.head_dim = qkv_features // num_heads
        self.value_head_dim = value_head_dim or self.head_dim
        self.rope = attributes.data(rope)
        self.sliding_window = sliding_window
        self.logits_soft_cap = logits_soft_cap
        self.scale = scale
        new_layer = functools.partial(
            linear.LinearGeneral,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            rngs=rngs,
        )
        new_projection = functools.partial(
            new_layer,
            kernel_init=kernel_init,
            bias_init=bias_init,
            promote_dtype=qkv_promote_dtype,
            dot_general=qkv_dot_general,
            dot_general_cls=qkv_dot_general_cls,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
        )
        heads, kv_heads = (num_heads, self.head_dim), (num_kv_heads, self.head_dim)
        values = (num_kv_heads, self.value_head_dim)
        self.query = new_projection(in_features, heads, use_bias=has_bias["query"])
        self.key = new_projection(in_kv_features, kv_heads, use_bias=has_bias["key"])
        self.value = new_projection(in_kv_features, values, use_bias=has_bias["value"])
        self.query_ln = attributes.data(None)
        self.key_ln = attributes.data(None)
        if self.normalize_qk:
            new_norm = functools.partial(
                _new_norm,
                normalize_qk,
                normalize_qk_axes,
                dtype=dtype,
                param_dtype=param_dtype,
                promote_dtype=ln_promote_dtype,
                rngs=rngs,
            )
            self.query_ln = new_norm(heads, scale_metadata=query_ln_scale_metadata)
            self.key_ln = new_norm(kv_heads, scale_metadata=key_ln_scale_metadata)
        self.out = new_layer(
            (num_heads, self.value_head_dim),
            out_features,
            axis=(-2, -1),
            use_bias=has_bias["out"],
            kernel_init=out_kernel_init or kernel_init,
            bias_init=out_bias_init or bias_init,
            promote_dtype=out_promote_dtype,
            dot_general=out_dot_general,
            dot_general_cls=out_dot_general_cls,
            kernel_metadata=out_kernel_metadata or kernel_metadata,
            bias_metadata=out_bias_metadata or bias_metadata,
        )
        sinks = Param(jnp.zeros(num_heads, param_dtype)) if use_sinks else None
        self.sinks: Param[jax.Array] | None = attributes.data(sinks)
        has_stream = keep_rngs and dropout_rate > 0
        self.rngs = rngs.dropout.fork() if has_stream else attributes.data(None)
        self.cached_key: Cache[jax.Array] | None = attributes.data(None)
        self.cached_value: Cache[jax.Array] | None = attributes.data(None)
        self.cache_index: Cache[jax.Array] | None = attributes.data(None)

    def __call__(
        self,
        inputs_q: Num[ArrayLike, "*batch queries in_features"],
        inputs_k: Num[ArrayLike, "*batch keys in_kv_features"]
        | KeysAndValues
        | None = None,
        inputs_v: Num[ArrayLike, "*batch keys in_kv_features"] | None = None,
        *,
        mask: Shaped[ArrayLike, "*mask_shape"] | Rule | None = None,
        deterministic: bool | None = None,
        rngs: Rngs | RngStream | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool = False,
        out_sharding: Any = None,
        qkv_sharding: Any = None,
        input_positions: Num[ArrayLike, "*positions queries"] | None = None,
        positions: Num[ArrayLike, "*positions queries"] | None = None,
        cache: KeyValueCache | None = None,
        bias: Num[ArrayLike, "*bias_shape"] | Rule | None = None,
        segment_ids: Int[ArrayLike, "*segments queries"] | None = None,
        prefix_lengths: Int[ArrayLike, "*of_each"] | None = None,
    ) -> Inexact[Array, "*batch queries out_features"]:
        """Attends from ``inputs_q`` to ``inputs_k`` and ``inputs_v``.

        With a ``cache``, a call takes the next tokens of each sequence, adds their keys
        and values, and attends to all tokens so far, causally. In chunks or token by
        token, this gives the same as one causal call for the whole sequence.

        When decoding with the layer's own cache, a call takes one token per sequence,
        at ``cache_index``. A full cache is an error. Inside a transform, where the
        index is not known, further tokens replace the last one instead;
        ``cache_index > max_length`` shows it afterwards.

        Args:
            inputs_q: ``[*batch, queries, in_features]``; batch axes are optional.
            inputs_k: ``[*batch, keys, in_kv_features]``; ``None``: ``inputs_q``. Or
                what `project_kv` returns for them.
            inputs_v: Likewise; ``None``: ``inputs_k``.
            mask: Where false or zero, a query does not see a key; broadcastable to
                ``[*batch, heads, queries, keys]``. When decoding, of that rank, with
                ``keys = max_length``. Or a function of positions, as for
                `nnx.decoding.attend`, which says what masks a ``cache`` takes.
            deterministic: Overrides the attribute, if not ``None``.
            rngs: Where the key for dropout comes from: the stream ``dropout`` of an
                Rngs, or an RngStream. ``None``: the layer's own stream.
            sow_weights: Whether to record the weights, for ``nnx.capture``, as the
                Intermediate ``attention_weights``, ``[*batch, heads, queries, keys]``.
            decode: Overrides the attribute, if not ``None``: whether to use the layer's
                own cache.
            is_causal: Whether query ``i`` sees only the keys ``0 .. i``. With a cache,
                calls are causal anyway.
            out_sharding: The sharding of the result on a mesh with explicit axes.
            qkv_sharding: That of queries, keys and values.
            input_positions: Passed on to ``attention_fn`` if given. When decoding, if
                ``attention_fn`` has a parameter of this name, ``None`` means
                ``cache_index``.
            positions: Where in its sequence each token is, ``[queries]`` or ``[*batch,
                queries]``, for ``rope``, ``bias`` and ``cache``; integers for the last
                two. ``None``: 0, 1, ..., or ``cache_index`` when decoding. Without a
                cache they hide no token: padding before a sequence needs a ``mask``.
                When decoding, they are for ``rope`` alone.
            cache: What `make_cache` returns; calls need ``positions`` then.
            bias: Added to the scaled dot products: an array or a function of positions,
                of the shape of ``mask``.
            segment_ids: The number of the sequence that each token belongs to, for
                several in one row; a query sees keys of its own.
            prefix_lengths: How many tokens at the beginning of a sequence see each
                other in both directions; see `nnx.decoding.attend`.

        Returns:
            An array ``[*batch, queries, out_features]``.

        Raises:
            ValueError: If neither the call nor the attribute says whether to decode,
                or, with dropout, whether to be deterministic; if a key is needed and
                there are no ``rngs``; if the inputs have the wrong size or don't fit
                together; if the cache is absent, full, or of another shape; if
                arguments exclude each other. Then nothing has changed.
            TypeError: If ``rngs`` is something else, or inputs of keys and values have
                the wrong size.
        """
        is_self = inputs_k is None or inputs_k is inputs_q
        inputs_q = arguments.as_array(inputs_q)
        own = self._own_cache(decode, cache, inputs_k, segment_ids, prefix_lengths)
        self._check_call(inputs_q, inputs_k, inputs_v, cache, is_self)
        stream = arguments.dropout_stream(self, deterministic, rngs)
        place = None if own is None else jnp.reshape(own[-1][...], (1,))
        positions = place if positions is None else positions
        if own is not None and attention.takes_positions(self.attention_fn):
            input_positions = positions if input_positions is None else input_positions
        sharding = arguments.if_set(out_sharding=qkv_sharding)
        query, keys = self.query(inputs_q, **sharding), inputs_k
        if not isinstance(keys, KeysAndValues):
            tokens = (positions, segment_ids) if is_self else (None, None)
            keys = inputs_q if keys is None else keys
            keys = self._project_kv(keys, inputs_v, *tokens, sharding)
        query = self._scaled(self._placed(self.query_ln, query, positions), positions)
        rules = is_causal, self.sliding_window, mask, bias
        # In its own cache, tokens are in the order in which they came.
        seen_from = positions if place is None else place
        pattern = AttentionPattern(seen_from, segment_ids, prefix_lengths, *rules)
        # A call that fails uses up no key.
        state = () if cache is None else vars(cache).values()
        with arguments.undone_on_failure(stream, *state):
            if cache is not None:
                keys, pattern = cache.add(query, keys, pattern)
            if own is not None:
                keys, filled = own_caches.extended(own, keys)
                pattern = dataclasses.replace(pattern, is_causal=True)
            outputs = self._attend(
                query, keys, pattern, stream, sow_weights, input_positions
            )
            outputs = self.out(outputs, **arguments.if_set(out_sharding=out_sharding))
        if own is not None:
            for variable, new in zip(own, filled, strict=True):
                variable[...] = new
        return outputs

    def project_kv(
        self,
        inputs_k: Num[ArrayLike, "*batch keys in_kv_features"],
        inputs_v: Num[ArrayLike, "*batch keys in_kv_features"] | None = None,
        *,
        positions: Num[ArrayLike, "*positions keys"] | None = None,
        segment_ids: Int[ArrayLike, "*segments keys"] | None = None,
        qkv_sharding: Any = None,
    ) -> KeysAndValues:
        """Computes keys and values once, such as those of an encoder, for many calls.

        A call takes them as its ``inputs_k``.

        Args:
            inputs_k: ``[*batch, keys, in_kv_features]``.
            inputs_v: Likewise; ``None``: ``inputs_k``.
            positions: Where in its sequence each token is, ``[keys]`` or
                ``[*batch, keys]``; negative for padding, which no query sees. ``None``:
                0, 1, ...
            segment_ids: The number of the sequence that each token belongs to; queries
                need them, too.
            qkv_sharding: The sharding of keys and values on a mesh with explicit axes.

        Returns:
            The keys and values, normalized and rotated as the layer does it.

        Example:
            >>> layer = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
            >>> encoded = jax.random.normal(jax.random.key(0), (1, 5, 8))
            >>> positions = jnp.array([[0, 1, 2, -1, -1]])  # the last two are padding
            >>> keys = layer.project_kv(encoded, positions=positions)
            >>> x = jnp.ones((1, 2, 8))
            >>> jnp.allclose(layer(x, keys), layer(x, encoded[:, :3]), atol=1e-6)
            Array(True, dtype=bool)
        """
        sharding = arguments.if_set(out_sharding=qkv_sharding)
        return self._project_kv(inputs_k, inputs_v, positions, segment_ids, sharding)

    def _project_kv(
        self,
        inputs_k: Any,
        inputs_v: Any,
        positions: Any,
        segment_ids: Any,
        sharding: Mapping[str, Any],
    ) -> KeysAndValues:
        inputs_k = arguments.as_array(inputs_k)
        inputs_v = inputs_k if inputs_v is None else arguments.as_array(inputs_v)
        key, value = self.key(inputs_k, **sharding), self.value(inputs_v, **sharding)
        key = self._placed(self.key_ln, key, positions)
        return KeysAndValues(key, value, positions, segment_ids)

    def _placed(self, norm: Any, x: jax.Array, positions: Any) -> jax.Array:
        """Normalizes and rotates queries or keys, ``[*batch, length, heads, size]``."""
        x = x if norm is None else norm(x)
        return x if self.rope is None else self.rope.rotate_heads(x, positions)

    def _scaled(self, query: jax.Array, positions: Any) -> jax.Array:
        """Multiplies queries by what depends on their positions."""
        if not callable(self.scale):
            return query
        positions = jnp.arange(query.shape[-3]) if positions is None else positions
        factors = jnp.asarray(self.scale(jnp.asarray(positions)))[..., None, None]
        leading = (1,) * (query.ndim - factors.ndim)
        factors = factors.reshape(leading + factors.shape)
        return (query * factors).astype(query.dtype)

    def _attend(
        self,
        query: jax.Array,
        keys: KeysAndValues,
        pattern: AttentionPattern,
        stream: RngStream | None,
        sow_weights: bool,
        input_positions: Any,
    ) -> jax.Array:
        """Averages the values: ``[*batch, queries, heads, value_head_dim]``."""
        return self.attention_fn(
            query,
            keys.key,
            keys.value,
            **pattern.options(query, keys),
            dropout_rng=None if stream is None else stream(),
            dropout_rate=self.dropout_rate,
            broadcast_dropout=self.broadcast_dropout,
            deterministic=stream is None,
            dtype=self.dtype,
            precision=self.precision,
            module=self if sow_weights else None,
            **arguments.if_set(
                input_positions=input_positions,
                scale=1.0 if callable(self.scale) else self.scale,
                logits_soft_cap=self.logits_soft_cap,
                sinks=arguments.read(self.sinks),
            ),
        )

    def _check_call(
        self, inputs_q: Any, inputs_k: Any, inputs_v: Any, cache: Any, is_self: bool
    ) -> None:
        """Refuses inputs that don't go together."""
        is_projected = isinstance(inputs_k, KeysAndValues)
        if inputs_v is not None and (inputs_k is None or is_projected):
            raise ValueError(
                "`inputs_k` cannot be None if `inputs_v` is not None.\n"
                "To use one array for keys and values, pass it as `inputs_k` only."
            )
        if inputs_q.shape[-1:] != (self.in_features,):
            raise ValueError(
                f"Incompatible input dimension, got {sum(inputs_q.shape[-1:])} but "
                f"module expects {self.in_features}."
            )
        if self.rope is not None and not (is_self or is_projected):
            raise ValueError(
                "MultiHeadAttention with rope= got key inputs whose positions it "
                "doesn't know.\nPass layer.project_kv(inputs_k, inputs_v, "
                "positions=...) as inputs_k."
            )
        if cache is not None and is_projected:
            raise ValueError(
                "MultiHeadAttention got both a cache, which holds keys of the call's "
                "own tokens, and keys from project_kv.\nPass one of them."
            )
        if cache is not None and attention.takes_positions(self.attention_fn):
            raise ValueError(
                "MultiHeadAttention: an attention_fn that rotates doesn't know the "
                "positions of keys in a cache.\nRotate keys before they are cached: "
                "MultiHeadAttention(..., rope=nnx.RoPE(...))."
            )

    def _own_cache(
        self, decode: bool | None, cache: Any, inputs_k: Any, *of_tokens: Any
    ) -> list[Cache[jax.Array]] | None:
        """The layer's own cache, if the call uses it."""
        has_keys = cache is not None or isinstance(inputs_k, KeysAndValues)
        if has_keys:
            is_decoding = self.decode if decode is None else decode
        else:
            is_decoding = arguments.setting(self, "decode", decode)
        if not is_decoding:
            return None
        if has_keys or any(x is not None for x in of_tokens):
            raise ValueError(
                "MultiHeadAttention with decode=True uses its own cache, and takes no "
                "cache=, keys from project_kv, segment_ids or prefix_lengths.\nTo pass "
                "a cache, use decode=False and cache=layer.make_cache(...)."
            )
        return own_caches.variables_of(self)

    def make_cache(
        self,
        batch: int,
        max_length: int,
        *,
        dtype: Dtype | None = None,
        packed: bool = False,
    ) -> KeyValueCache:
        """Makes an empty cache for calls with ``cache=``, with the layer's window.

        Args:
            batch: The number of sequences, or of rows of them.
            max_length: The number of tokens that each has room for.
            dtype: The dtype in which keys and values are kept; ``None``:
                `nnx.precision.compute_dtype` of the layer.
            packed: Whether a row holds several sequences; calls need ``segment_ids``
                then.

        Example:
            >>> layer = nnx.MultiHeadAttention(
            ...     4, 8, num_kv_heads=2, sliding_window=3, rngs=nnx.Rngs(0)
            ... )
            >>> layer.make_cache(1, 100).key.shape
            (1, 3, 2, 2)
        """
        return KeyValueCache(
            batch,
            max_length,
            kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            value_head_dim=self.value_head_dim,
            dtype=compute_dtypes.compute_dtype(self) if dtype is None else dtype,
            window=self.sliding_window,
            packed=packed,
        )

    def init_cache(self, input_shape: Shape, dtype: Dtype | None = None) -> None:
        """Makes an empty cache; new Variables replace old ones.

        Args:
            input_shape: ``(*batch, max_length, features)``, the shape of the inputs of
                keys for the longest sequence; the features are ignored.
            dtype: The dtype in which keys and values are stored; ``None``:
                `nnx.precision.compute_dtype` of the layer.

        Raises:
            ValueError: If ``input_shape`` has no room for length and features.
            TraceContextError: If another trace owns the layer.
        """
        if len(input_shape) < 2:
            raise ValueError(
                "init_cache of MultiHeadAttention needs input_shape=(*batch, "
                f"max_length, features), got {tuple(input_shape)}."
            )
        dtype = compute_dtypes.compute_dtype(self) if dtype is None else dtype
        heads = (*input_shape[:-1], self.num_kv_heads)
        self.cached_key = Cache(jnp.zeros((*heads, self.head_dim), dtype))
        self.cached_value = Cache(jnp.zeros((*heads, self.value_head_dim), dtype))
        self.cache_index = Cache(jnp.zeros((), jnp.int32))

    def set_view(
        self,
        deterministic: bool | None = None,
        decode: bool | None = None,
        batch_size: int | Shape | None = None,
        max_length: int | None = None,
    ) -> None:
        """Sets how the view's layer works.

        Args:
            deterministic: Whether attention weights are never dropped.
            decode: Whether calls decode, with the cache.
            batch_size: The batch axes of a new cache, a size or a shape. It is made if
                ``max_length`` is given too and there is none yet; see ``init_cache``.
            max_length: How many tokens a new cache has room for.
        """
        if deterministic is not None:
            self.deterministic = deterministic
        if decode is not None:
            self.decode = decode
        if batch_size is None or max_length is None or self.cached_key is not None:
            return
        batch = arguments.sizes(batch_size)
        self.init_cache((*batch, max_length, self.in_kv_features))


def _check_heads(num_heads: int, num_kv_heads: int, qkv_features: int) -> None:
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads ({num_heads}) must be divisible by num_kv_heads "
            f"({num_kv_heads}): each key head serves equally many query heads."
        )
    if num_heads < 1 or qkv_features % num_heads:
        raise ValueError(
            f"Memory dimension qkv_features ({qkv_features}) must be divisible by "
            f"'num_heads' heads ({num_heads})."
        )


def _has_bias(use_bias: bool | Collection[str]) -> dict[str, bool]:
    """Whether each of the four projections has a bias."""
    names = ("query", "key", "value", "out")
    if isinstance(use_bias, bool):
        return dict.fromkeys(names, use_bias)
    if isinstance(use_bias, str) or not set(use_bias) <= set(names):
        raise ValueError(
            f"MultiHeadAttention got use_bias={use_bias!r}.\nPass True, False, or the "
            f"names of the projections that have biases, out of {names}."
        )
    return {name: name in use_bias for name in names}


def _new_norm(
    norm: bool | Callable[..., Any],
    axes: int | Sequence[int],
    heads: tuple[int, int],
    **options: Any,
) -> Any:
    """A layer that normalizes ``[*batch, length, heads, head_dim]`` along some axes."""
    axes = arguments.sizes(axes)
    if axes != (-1,):
        options |= {"feature_axes": axes, "reduction_axes": axes}
    size = math.prod(heads[axis] for axis in axes)
    if norm is True:
        return normalization.LayerNorm(size, use_bias=False, **options)
    assert not isinstance(norm, bool)
    return norm(size, **options)
