"""Attention with learned projections, and with a cache for decoding token by token.

A call checks its input, then projects, attends, and writes last: a call that fails
leaves caches and random streams as they were. The cache is three Variables of the
layer: keys and values, ``[*batch, max_length, heads, depth]``, whose first ``index``
entries are filled, and the index. A step computes the new contents of the cache,
attends to them, and writes last.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from graftree import _jax
from graftree.annotations import (
    Array,
    ArrayLike,
    DotGeneralT,
    Dtype,
    Inexact,
    Initializer,
    Num,
    PrecisionLike,
    PromoteDtypeFn,
    Shape,
    Shaped,
)
from graftree.core.modules.modules import Module
from graftree.core.objects import attributes
from graftree.core.rng.streams import Rngs, RngStream
from graftree.core.variables import variables
from graftree.core.variables.kinds import Cache
from graftree.nn import attention, compute_dtypes, linear, normalization
from graftree.nn.support import arguments, meshes


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
        use_bias: Whether the projections have biases.
        attention_fn: Called like `dot_product_attention`, with keywords. To set options
            of that function, fill them in: ``functools.partial(
            nnx.dot_product_attention, logits_soft_cap=50.0)``.
        decode: Whether calls decode; ``None``: each call must say.
        normalize_qk: Whether queries and keys are normalized per head, by LayerNorms.
        qkv_promote_dtype: The ``promote_dtype`` of ``query``, ``key`` and ``value``.
        out_promote_dtype: That of ``out``.
        ln_promote_dtype: That of the LayerNorms.
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
        query_ln_scale_metadata, key_ln_scale_metadata: Those of the LayerNorms.

    Attributes:
        query: LinearGeneral, kernel ``[in_features, num_heads, head_dim]``.
        key, value: LinearGeneral, kernel ``[in_kv_features, num_kv_heads, head_dim]``.
        query_ln, key_ln: LayerNorm of ``head_dim`` features, or ``None``.
        out: LinearGeneral, kernel ``[num_heads, head_dim, out_features]``.
        head_dim: ``qkv_features / num_heads``.
        rngs: The layer's own RngStream for dropout, or ``None``.
        cached_key, cached_value: Cache, ``[*batch, max_length, num_kv_heads,
            head_dim]``, or ``None``; made by `init_cache`.
        cache_index: Cache, an int32: how many tokens have been decoded.

    Raises:
        ValueError: If ``num_heads`` does not divide ``qkv_features``, or
            ``num_kv_heads`` does not divide ``num_heads``.
        AttributeError: If ``rngs`` has no stream ``params``, or none for dropout.

    Example:
        >>> layer = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
        >>> x = jax.random.normal(jax.random.key(1), (4, 3, 8))
        >>> y = layer(x, is_causal=True)
        >>> layer.init_cache((4, 3, 8))
        >>> tokens = [layer(x[:, t : t + 1], decode=True) for t in range(3)]
        >>> jnp.allclose(jnp.concatenate(tokens, axis=1), y, atol=1e-5)
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
        use_bias: bool = True,
        attention_fn: Callable[..., Any] = attention.dot_product_attention,
        decode: bool | None = None,
        normalize_qk: bool = False,
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
        self.use_bias = use_bias
        self.attention_fn = attention_fn
        self.decode = decode
        self.normalize_qk = normalize_qk
        self.qkv_promote_dtype = qkv_promote_dtype
        self.out_promote_dtype = out_promote_dtype
        self.ln_promote_dtype = ln_promote_dtype
        self.qkv_dot_general = qkv_dot_general
        self.out_dot_general = out_dot_general
        self.qkv_dot_general_cls = qkv_dot_general_cls
        self.out_dot_general_cls = out_dot_general_cls
        self.head_dim = qkv_features // num_heads
        heads, kv_heads = (num_heads, self.head_dim), (num_kv_heads, self.head_dim)
        new_layer = functools.partial(
            linear.LinearGeneral,
            use_bias=use_bias,
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
        self.query = new_projection(in_features, heads)
        self.key = new_projection(in_kv_features, kv_heads)
        self.value = new_projection(in_kv_features, kv_heads)
        self.query_ln = attributes.data(None)
        self.key_ln = attributes.data(None)
        if normalize_qk:
            new_norm = functools.partial(
                normalization.LayerNorm,
                self.head_dim,
                use_bias=False,
                dtype=dtype,
                param_dtype=param_dtype,
                promote_dtype=ln_promote_dtype,
                rngs=rngs,
            )
            self.query_ln = new_norm(scale_metadata=query_ln_scale_metadata)
            self.key_ln = new_norm(scale_metadata=key_ln_scale_metadata)
        self.out = new_layer(
            heads,
            out_features,
            axis=(-2, -1),
            kernel_init=out_kernel_init or kernel_init,
            bias_init=out_bias_init or bias_init,
            promote_dtype=out_promote_dtype,
            dot_general=out_dot_general,
            dot_general_cls=out_dot_general_cls,
            kernel_metadata=out_kernel_metadata or kernel_metadata,
            bias_metadata=out_bias_metadata or bias_metadata,
        )
        has_stream = keep_rngs and dropout_rate > 0
        self.rngs = rngs.dropout.fork() if has_stream else attributes.data(None)
        self.cached_key: Cache[jax.Array] | None = attributes.data(None)
        self.cached_value: Cache[jax.Array] | None = attributes.data(None)
        self.cache_index: Cache[jax.Array] | None = attributes.data(None)

    def __call__(
        self,
        inputs_q: Num[ArrayLike, "*batch queries in_features"],
        inputs_k: Num[ArrayLike, "*batch keys in_kv_features"] | None = None,
        inputs_v: Num[ArrayLike, "*batch keys in_kv_features"] | None = None,
        *,
        mask: Shaped[ArrayLike, "*mask_shape"] | None = None,
        deterministic: bool | None = None,
        rngs: Rngs | RngStream | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool = False,
        out_sharding: Any = None,
        qkv_sharding: Any = None,
        input_positions: Num[ArrayLike, "*positions queries"] | None = None,
    ) -> Inexact[Array, "*batch queries out_features"]:
        """Attends from ``inputs_q`` to ``inputs_k`` and ``inputs_v``.

        When decoding, a call takes one token per sequence, adds its key and value to
        the cache at ``cache_index``, and attends to all tokens so far. Token by token,
        this gives the same as one causal call for the whole sequence. A full cache is
        an error. Inside a transform, where the index is not known, further tokens
        replace the last one instead; ``cache_index > max_length`` shows it afterwards.

        Args:
            inputs_q: ``[*batch, queries, in_features]``; batch axes are optional.
            inputs_k: ``[*batch, keys, in_kv_features]``; ``None``: ``inputs_q``.
            inputs_v: Likewise; ``None``: ``inputs_k``.
            mask: Where false or zero, a query does not see a key; broadcastable to
                ``[*batch, heads, queries, keys]``. When decoding, of that rank, with
                ``keys = max_length``.
            deterministic: Overrides the attribute, if not ``None``.
            rngs: Where the key for dropout comes from: the stream ``dropout`` of an
                Rngs, or an RngStream. ``None``: the layer's own stream.
            sow_weights: Whether to record the weights, for ``nnx.capture``, as the
                Intermediate ``attention_weights``, ``[*batch, heads, queries, keys]``.
            decode: Overrides the attribute, if not ``None``.
            is_causal: Whether query ``i`` sees only the keys ``0 .. i``. Decoding is
                causal anyway.
            out_sharding: The sharding of the result on a mesh with explicit axes.
            qkv_sharding: That of queries, keys and values.
            input_positions: Passed on to ``attention_fn`` if given. When decoding, if
                ``attention_fn`` has a parameter of this name, ``None`` means
                ``cache_index``.

        Returns:
            An array ``[*batch, queries, out_features]``.

        Raises:
            ValueError: If neither the call nor the attribute says whether to decode,
                or, with dropout, whether to be deterministic; if a key is needed and
                there are no ``rngs``; if the inputs have the wrong size or don't fit
                together; if the cache is absent, full, or of another shape. Then
                nothing has changed.
            TypeError: If ``rngs`` is something else, or inputs of keys and values have
                the wrong size.
        """
        inputs = self._fill_in(inputs_q, inputs_k, inputs_v)
        is_decoding = arguments.setting(self, "decode", decode)
        cache = _cache_of(self) if is_decoding else None
        stream = self._key_stream(deterministic, rngs)
        query, key, value = self._project(*inputs, sharding=qkv_sharding)
        if cache is not None:
            filled = _extended(cache, key, value)
            key, value = filled[0].astype(key.dtype), filled[1].astype(value.dtype)
            mask = attention.combine_masks(_mask_of(cache), mask, dtype=bool)
            is_causal = False  # the mask is causal
            if input_positions is None and _takes_positions(self.attention_fn):
                input_positions = jnp.reshape(cache[-1][...], (1,))
        # A call that fails uses up no key.
        with arguments.undone_on_failure(stream):
            outputs = self.attention_fn(
                query,
                key,
                value,
                mask=mask,
                dropout_rng=None if stream is None else stream(),
                dropout_rate=self.dropout_rate,
                broadcast_dropout=self.broadcast_dropout,
                deterministic=stream is None,
                dtype=self.dtype,
                precision=self.precision,
                module=self if sow_weights else None,
                is_causal=is_causal,
                **arguments.if_set(input_positions=input_positions),
            )
            outputs = self.out(outputs, **arguments.if_set(out_sharding=out_sharding))
        if cache is not None:
            for variable, new in zip(cache, filled, strict=True):
                variable[...] = new
        return outputs

    def _fill_in(self, inputs_q: Any, inputs_k: Any, inputs_v: Any) -> list[Any]:
        """Fills in inputs of keys and values that were left out, and checks them."""
        if inputs_k is None and inputs_v is not None:
            raise ValueError(
                "`inputs_k` cannot be None if `inputs_v` is not None.\n"
                "To use one array for keys and values, pass it as `inputs_k` only."
            )
        inputs_k = inputs_q if inputs_k is None else inputs_k
        inputs_v = inputs_k if inputs_v is None else inputs_v
        inputs = [*map(arguments.as_array, (inputs_q, inputs_k, inputs_v))]
        if inputs[0].shape[-1:] != (self.in_features,):
            raise ValueError(
                f"Incompatible input dimension, got {sum(inputs[0].shape[-1:])} but "
                f"module expects {self.in_features}."
            )
        return inputs

    def _key_stream(self, deterministic: bool | None, rngs: Any) -> RngStream | None:
        """Chooses the stream for dropout; ``None`` if nothing is dropped."""
        drops = self.dropout_rate > 0
        if not drops or arguments.setting(self, "deterministic", deterministic):
            return None
        stream = arguments.stream(self, rngs, "dropout")
        if stream is None:
            raise ValueError(
                "'rngs' must be provided to the call, for dropout.\n"
                "Pass `rngs=nnx.Rngs(dropout=0)` or `deterministic=True`."
            )
        return stream

    def _project(
        self, inputs_q: Any, inputs_k: Any, inputs_v: Any, sharding: Any
    ) -> list[jax.Array]:
        """Queries, keys and values, ``[*batch, length, heads, head_dim]``."""
        options = arguments.if_set(out_sharding=sharding)
        query = self.query(inputs_q, **options)
        key = self.key(inputs_k, **options)
        value = self.value(inputs_v, **options)
        if self.query_ln is not None:
            query = self.query_ln(query)
        if self.key_ln is not None:
            key = self.key_ln(key)
        return [query, key, value]

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
        shape = (*input_shape[:-1], self.num_kv_heads, self.head_dim)
        self.cached_key = Cache(jnp.zeros(shape, dtype))
        self.cached_value = Cache(jnp.zeros(shape, dtype))
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


def _takes_positions(attention_fn: Callable[..., Any]) -> bool:
    """Whether a function declares the parameter ``input_positions``."""
    try:
        return "input_positions" in inspect.signature(attention_fn).parameters
    except (TypeError, ValueError):  # functions in C may have no signature
        return False


def _cache_of(layer: MultiHeadAttention) -> list[Cache[jax.Array]]:
    """Keys, values and index of a layer that is about to decode.

    Raises:
        ValueError: If there is no cache.
        TraceContextError: If another trace owns it.
        ImmutableVariableError: If it is read-only.
    """
    cache = [layer.cached_key, layer.cached_value, layer.cache_index]
    existing = [variable for variable in cache if variable is not None]
    if len(existing) < len(cache):
        raise ValueError(
            "Autoregressive cache not initialized.\nCall `init_cache((*batch, "
            "max_length, features))` first, or pass `decode=False`."
        )
    for variable in existing:
        variables.check_write(variable)
    return existing


def _extended(
    cache: list[Cache[jax.Array]], key: jax.Array, value: jax.Array
) -> list[jax.Array]:
    """Computes the contents of the cache with one more token; writes nothing.

    Args:
        cache: Keys, values and index.
        key: ``[*batch, 1, heads, depth]``.
        value: Likewise.

    Returns:
        Keys and values, in the dtype of the cache, and the index.

    Raises:
        ValueError: If the shape is another one, or if the cache is full and the index
            is known: not in a trace, where the last entry is replaced.
    """
    *olds, index = [variable[...] for variable in cache]
    *batch, max_length, heads, depth = olds[0].shape
    expected = (*batch, 1, heads, depth)
    for name, x in (("key", key), ("value", value)):
        if x.shape != expected:
            raise ValueError(
                f"Autoregressive cache shape error, expected {name} shape "
                f"{expected} instead got {x.shape}.\nDecode one token per call, "
                "[*batch, 1, features], with the batch axes that `init_cache` got."
            )
    if not isinstance(index, _jax.Tracer) and int(index) >= max_length:
        raise ValueError(
            f"The cache of attention is full: cache_index is {index}, max_length "
            f"is {max_length}.\nMake a longer one with `init_cache`."
        )
    insert = functools.partial(
        jax.lax.dynamic_update_slice_in_dim, start_index=index, axis=-3
    )
    news = zip(olds, (key, value), strict=True)
    pairs = [meshes.together(old, x.astype(old.dtype)) for old, x in news]
    return [*(insert(old, x) for old, x in pairs), index + 1]


def _mask_of(cache: list[Cache[jax.Array]]) -> jax.Array:
    """Lets a new token see the filled entries and its own.

    Returns:
        Booleans ``[1, ..., 1, max_length]``, of the rank of keys and values.
    """
    keys, _, index = cache
    positions = jnp.arange(keys.shape[-3], dtype=index.dtype)
    return jnp.expand_dims(positions <= index[...], tuple(range(keys.ndim - 1)))
