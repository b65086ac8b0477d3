"""Dot-product attention as functions, and the masks that say which keys a query sees.

Two paths lead to the same result. The *fused* one is ``jax.nn.dot_product_attention``;
JAX decides how to compute it (so far with plain operations that XLA fuses). The
*explicit* one computes the weights as an array. You need that to drop weights at
random, to record them, or for options that JAX's function lacks:
`dot_product_attention` lists them. All input is checked before anything is recorded.

Shapes are those of a batch of sequences: ``[*batch, length, heads, depth]``. With fewer
key and value heads than query heads, neighbouring query heads share them (grouped-query
attention): query head ``h`` of ``H`` uses key head ``h // (H // key heads)``. A mask
broadcasts to ``[*batch, heads, queries, keys]``, the shape of the attention weights; an
entry that is false or zero hides a key from a query.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from graftree.annotations import (
    Array,
    ArrayLike,
    Dtype,
    Inexact,
    Integer,
    Num,
    PrecisionLike,
    PromoteDtypeFn,
    Shape,
    Shaped,
)
from graftree.core.modules.modules import Module
from graftree.core.variables.kinds import Intermediate
from graftree.nn.support import arguments, arithmetic, eager, jax_functions


def dot_product_attention(
    query: Num[ArrayLike, "*batch queries heads depth"],
    key: Num[ArrayLike, "*batch keys kv_heads depth"],
    value: Num[ArrayLike, "*batch keys v_heads v_depth"],
    bias: Num[ArrayLike, "*bias_shape"] | None = None,
    mask: Shaped[ArrayLike, "*mask_shape"] | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Dtype | None = None,
    precision: PrecisionLike = None,
    module: Module | None = None,
    promote_dtype: PromoteDtypeFn = arguments.promote_dtype,
    is_causal: bool = False,
    *,
    scale: float | Array | None = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | Array | None = None,
    sinks: Num[ArrayLike, "heads"] | None = None,
    key_value_seq_lengths: Integer[ArrayLike, "*batch"] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
) -> Inexact[Array, "*batch queries heads v_depth"]:
    """Averages the values, weighted by how well their keys fit the query.

    Computes ``softmax(cap(query @ key^T * scale) + bias) @ value`` per head, where
    ``cap(x)`` is ``logits_soft_cap * tanh(x / logits_soft_cap)``, or ``x`` without a
    cap. A query that sees no key gets the plain average of all values; with ``sinks``
    it gets zeros.

    Calls `jax.nn.dot_product_attention`, except where that cannot do it: when dropout
    is active, when the weights are recorded (``module``), with a soft cap or sinks,
    when key and value differ in depth or number of heads, in float32 with a
    ``precision``, and in dtypes other than float32 and bfloat16: its softmax is
    float32, and float16 does not work on all platforms. The weights are then computed
    as an array, in ``dtype``, with a softmax in float32 or wider. For complex numbers
    it is the softmax of the real parts of the dot products, as in JAX's function.

    By default, that function uses XLA's kernels on all platforms, up to JAX 0.12.
    ``implementation="cudnn"`` asks for the fused kernel of NVIDIA GPUs, as in
    ``MultiHeadAttention(..., attention_fn=functools.partial(dot_product_attention,
    implementation="cudnn"))``; it takes bfloat16 and float16.

    Args:
        query: ``[*batch, queries, heads, depth]``; any number of batch axes, or none.
        key: ``[*batch, keys, kv_heads, depth]``; ``kv_heads`` divides ``heads``.
        value: ``[*batch, keys, v_heads, v_depth]``; ``v_heads`` divides ``heads``.
        bias: Added to the scaled dot products; broadcastable to
            ``[*batch, heads, queries, keys]``.
        mask: Where false or zero, a query does not see a key; broadcastable likewise.
        broadcast_dropout: Whether all batch entries and heads drop the same weights.
        dropout_rng: The key for dropout.
        dropout_rate: The probability that a weight is dropped, in ``[0, 1)``.
        deterministic: Whether nothing is dropped, whatever the rate.
        dtype: The dtype of the computation and the output; ``None``: inferred from
            query, key and value.
        precision: Passed to the contractions.
        module: Records the weights as the Intermediate ``attention_weights``, for
            ``nnx.capture``.
        promote_dtype: Called as ``promote_dtype((query, key, value), dtype=dtype)``.
        is_causal: Whether query ``i`` sees only the keys ``0 .. i``.
        scale: The factor of the dot products; ``None``: ``1 / sqrt(depth)``.
        sliding_window: With ``is_causal``: how many keys a query sees, its own
            included, so query ``i`` sees ``i - sliding_window + 1 .. i``. Hugging Face
            calls it ``sliding_window`` too.
        logits_soft_cap: Keeps scaled dot products between minus and plus this positive
            number; bias and masks come after it.
        sinks: A logit for each query head, ``[heads]``, that takes part in the softmax
            but has no value: the weights of the keys then sum to less than one.
        key_value_seq_lengths: How many of the keys each sequence has, ``int[*batch]``;
            later keys are not seen.
        implementation: Passed to JAX's function where that is used; ``None`` lets JAX
            choose.

    Returns:
        An array ``[*batch, queries, heads, v_depth]``.

    Raises:
        ValueError: If shapes or numbers of heads don't fit, if the rate is not in
            ``[0, 1)``, if dropout is active without a key, or if ``sliding_window`` is
            not a positive integer or comes without ``is_causal``.

    Example:
        >>> key = jnp.array([[[9.0, 0.0]], [[0.0, 9.0]]])  # two keys, one head
        >>> value = jnp.array([[[1.0, 2.0]], [[3.0, 4.0]]])
        >>> nnx.dot_product_attention(9 * key, key, value)[:, 0]
        Array([[1., 2.],
               [3., 4.]], dtype=float32)
        >>> nnx.dot_product_attention(jnp.zeros((1, 1, 2)), key, value)[:, 0]
        Array([[2., 3.]], dtype=float32)

        Each of four tokens sees itself and the one before it:

        >>> x, value = jnp.zeros((4, 1, 2)), jnp.eye(4)[:, None]
        >>> options = {"is_causal": True, "sliding_window": 2}
        >>> nnx.dot_product_attention(x, x, value, **options)[:, 0]
        Array([[1. , 0. , 0. , 0. ],
               [0.5, 0.5, 0. , 0. ],
               [0. , 0.5, 0.5, 0. ],
               [0. , 0. , 0.5, 0.5]], dtype=float32)

    References:
        Vaswani et al., 2017, "Attention Is All You Need", eq. 1. Ainslie et al., 2023,
        "GQA", section 2.2. Jiang et al., 2023, "Mistral 7B", section 2 (window). Gemma
        Team, 2024, "Gemma 2", section 2 (soft cap). OpenAI, 2025, "gpt-oss Model Card",
        section 2.2 (sinks).
    """
    q, k, v = promote_dtype((query, key, value), dtype=dtype)
    _check_shapes(q, k, v)
    check_window(sliding_window, is_causal)
    lengths = checked_lengths(key_value_seq_lengths, q.shape[:-3])
    dropout_key = _dropout_key(dropout_rate, dropout_rng, deterministic)
    options = {"is_causal": is_causal, "scale": scale, "sliding_window": sliding_window}
    beyond_jax = (module, dropout_key, logits_soft_cap, sinks)
    can_fuse = _can_fuse(q, k, v, precision, implementation)
    if can_fuse and all(x is None for x in beyond_jax):
        attend = _attend if implementation is None else _attend_as_it_is
        shape = _weights_shape(q, k)
        bias, mask = to_rank("bias", bias, shape), to_rank("mask", mask, shape)
        arrays = (q, k, v, bias, mask, lengths)
        return attend(*arrays, implementation=implementation, **options)
    weights = dot_product_attention_weights(
        q,
        k,
        bias=bias,
        mask=mask,
        broadcast_dropout=broadcast_dropout,
        dropout_rng=dropout_rng,
        dropout_rate=dropout_rate,
        deterministic=deterministic,
        dtype=dtype,
        precision=precision,
        module=module,
        promote_dtype=promote_dtype,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        key_value_seq_lengths=lengths,
        **options,
    )
    return _average(weights, v, precision)


@arguments.own_arithmetic
def dot_product_attention_weights(
    query: Num[ArrayLike, "*batch queries heads depth"],
    key: Num[ArrayLike, "*batch keys kv_heads depth"],
    bias: Num[ArrayLike, "*bias_shape"] | None = None,
    mask: Shaped[ArrayLike, "*mask_shape"] | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Dtype | None = None,
    precision: PrecisionLike = None,
    module: Module | None = None,
    promote_dtype: PromoteDtypeFn = arguments.promote_dtype,
    is_causal: bool = False,
    *,
    scale: float | Array | None = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | Array | None = None,
    sinks: Num[ArrayLike, "heads"] | None = None,
    key_value_seq_lengths: Integer[ArrayLike, "*batch"] | None = None,
) -> Inexact[Array, "*batch heads queries keys"]:
    """Computes how much each query looks at each key.

    ``softmax(cap(query @ key^T * scale) + bias)`` per head, over the keys and the sink.
    Masked entries count as the lowest finite number: their weights are zero, or all
    weights equal where every key is masked and there is no sink. Active dropout zeroes
    weights and scales up the rest.

    Args:
        query: ``[*batch, queries, heads, depth]``.
        key: ``[*batch, keys, kv_heads, depth]``; ``kv_heads`` divides ``heads``.
        bias: As in `dot_product_attention`, like all arguments that follow.
        mask: Where false or zero, a query does not see a key.
        broadcast_dropout: Whether all batch entries and heads drop the same weights.
        dropout_rng: The key for dropout.
        dropout_rate: The probability that a weight is dropped, in ``[0, 1)``.
        deterministic: Whether nothing is dropped.
        dtype: The dtype of the computation and the output.
        precision: Passed to the contraction.
        module: Records the weights, before dropout.
        promote_dtype: Called as ``promote_dtype((query, key), dtype=dtype)``.
        is_causal: Whether query ``i`` sees only the keys ``0 .. i``.
        scale: As in `dot_product_attention`, like all arguments that follow.
        sliding_window: How many keys a query sees, its own included.
        logits_soft_cap: The bound of scaled dot products.
        sinks: A logit for each query head.
        key_value_seq_lengths: How many of the keys each sequence has.

    Returns:
        An array ``[*batch, heads, queries, keys]``.

    Raises:
        ValueError: As `dot_product_attention`.

    Example:
        >>> from graftree.nn import attention
        >>> x = jnp.zeros((3, 1, 2))  # three tokens, one head
        >>> attention.dot_product_attention_weights(x, x, is_causal=True).round(2)
        Array([[[1.  , 0.  , 0.  ],
                [0.5 , 0.5 , 0.  ],
                [0.33, 0.33, 0.33]]], dtype=float32)
    """
    q, k = promote_dtype((query, key), dtype=dtype)
    _check_shapes(q, k)
    dropout_key = _dropout_key(dropout_rate, dropout_rng, deterministic)
    shape = _weights_shape(q, k)
    bias, mask = to_rank("bias", bias, shape), to_rank("mask", mask, shape)
    check_window(sliding_window, is_causal)
    lengths = checked_lengths(key_value_seq_lengths, q.shape[:-3])
    sinks = _sinks(sinks, shape)
    logits = _logits(q, k, scale, precision)
    logits = _capped(logits, logits_soft_cap)
    if bias is not None:
        logits = logits + _real(bias)
    visible = _visible(shape, mask, is_causal, sliding_window, lengths)
    if visible is not None:
        logits = jnp.where(visible, logits, jnp.finfo(logits.dtype).min)
    weights = _softmax(logits, sinks).astype(q.dtype)
    if module is not None:
        module.sow(Intermediate, "attention_weights", weights)
    if dropout_key is None:
        return weights
    if broadcast_dropout:
        shape = (1,) * (len(shape) - 2) + shape[-2:]
    return _drop(weights, dropout_key, float(dropout_rate), shape)


def _check_shapes(query: jax.Array, key: jax.Array, *value: jax.Array) -> None:
    """Refuses arrays that do not fit together; the value is optional."""
    arrays = (query, key, *value)
    names, fault = ", ".join("qkv"[: len(arrays)]), None
    if len({x.ndim for x in arrays}) > 1:
        ranks = ", ".join([str(x.ndim) for x in arrays])
        fault = f"{names} must have same rank, but got {ranks}"
    elif query.ndim < 3:
        fault = f"{names} must have rank 3 or more"
    elif len({x.shape[:-3] for x in arrays}) > 1:
        fault = f"{names} batch dims must match"
    elif value and key.shape[-3] != value[0].shape[-3]:
        fault = "k, v lengths must match"
    elif query.shape[-1] != key.shape[-1]:
        fault = "q, k depths must match"
    for name, x in zip(("Key", "Value"), arrays[1:], strict=False):
        if fault is None and (x.shape[-2] == 0 or query.shape[-2] % x.shape[-2]):
            fault = (
                f"Query heads ({query.shape[-2]}) must be multiple of {name} heads "
                f"({x.shape[-2]}): the number of query heads must be a multiple"
            )
    if fault is not None:
        shapes = ", ".join([str(x.shape) for x in arrays])
        raise ValueError(f"{fault}; as [*batch, length, heads, depth]: {shapes}.")


def _dropout_key(
    rate: float, key: jax.Array | None, deterministic: bool
) -> jax.Array | None:
    """Returns the key if dropout is active; refuses a bad rate, and a missing key."""
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout_rate must be in the range [0, 1), got {rate}.")
    if deterministic or rate == 0.0:
        return None
    if key is None:
        raise ValueError(
            "dropout_rng is required when dropout_rate > 0 and deterministic=False."
        )
    return key


def _can_fuse(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    precision: PrecisionLike,
    implementation: Literal["xla", "cudnn"] | None,
) -> bool:
    """Whether JAX's function computes this, with full precision and where it is to."""
    if key.shape != value.shape or not query.dtype == key.dtype == value.dtype:
        return False
    if implementation is not None and query.dtype == jnp.float16:
        return True
    # It takes no precision, which bfloat16 does not need: products are exact anyway.
    is_exact = query.dtype == jnp.float32 and precision is None
    return is_exact or query.dtype == jnp.bfloat16


def _weights_shape(query: jax.Array, key: jax.Array) -> tuple[int, ...]:
    """Combines shapes to ``[*batch, heads, queries, keys]``."""
    return (*query.shape[:-3], query.shape[-2], query.shape[-3], key.shape[-3])


def to_rank(name: str, x: Any, shape: Shape) -> jax.Array | None:
    """Gives a mask or bias the rank of the weights, with axes of size one in front."""
    if x is None:
        return None
    x = jnp.asarray(x)
    surplus = x.ndim - len(shape)
    full = (1,) * -surplus + x.shape
    excess, sizes = full[: max(surplus, 0)], full[max(surplus, 0) :]
    fits = all(n in (1, m) for n, m in zip(sizes, shape, strict=True))
    if not fits or any(n != 1 for n in excess):
        raise ValueError(
            f"The {name} of attention must be broadcastable to [*batch, heads, "
            f"queries, keys] = {list(shape)}, but got the shape {list(x.shape)}."
        )
    return jnp.reshape(x, sizes)


def check_window(window: int | None, is_causal: bool) -> None:
    """Refuses a window that is not a positive integer, or not of causal attention."""
    if window is None:
        return
    if not isinstance(window, numbers.Integral) or window < 1:
        raise ValueError(f"sliding_window must be a positive integer, got {window}.")
    if not is_causal:
        raise ValueError(
            "sliding_window counts back from each token, so it needs is_causal=True.\n"
            "With a cache, pass the window to nnx.decoding.KeyValueCache; for any "
            "other window, pass a mask."
        )


def checked_lengths(lengths: Any, batch: Shape) -> jax.Array | None:
    """Checks the numbers of keys of sequences, and makes them int32."""
    if lengths is None:
        return None
    lengths = jnp.asarray(lengths)
    if lengths.shape != batch or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(
            "key_value_seq_lengths of attention must be integers of the shape of the "
            f"batch axes, {list(batch)}, but got {lengths.dtype}{list(lengths.shape)}."
        )
    return lengths.astype(jnp.int32)


def _sinks(sinks: Any, shape: Shape) -> jax.Array | None:
    """Brings sinks to the rank of the weights."""
    if sinks is None:
        return None
    sinks, heads = jnp.asarray(sinks), shape[-3]
    if sinks.shape != (heads,):
        raise ValueError(
            f"The sinks of attention must be one number for each of {heads} query "
            f"heads, [{heads}], but got the shape {list(sinks.shape)}."
        )
    return jnp.reshape(sinks, (1,) * (len(shape) - 3) + (heads, 1, 1))


def takes_positions(attention_fn: Callable[..., Any]) -> bool:
    """Whether a function declares the parameter ``input_positions``."""
    try:
        return "input_positions" in inspect.signature(attention_fn).parameters
    except (TypeError, ValueError):  # functions in C may have no signature
        return False


def _attend_as_it_is(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    lengths: jax.Array | None,
    *,
    is_causal: bool,
    implementation: Literal["xla", "cudnn"] | None,
    scale: float | jax.Array | None,
    sliding_window: int | None,
) -> jax.Array:
    """JAX's attention, for any number of batch axes."""
    batch = query.shape[:-3]

    def with_one_batch_axis(x: jax.Array) -> jax.Array:
        if all(n == 1 for n in x.shape[:-3]):
            return jnp.reshape(x, (1, *x.shape[-3:]))
        x = jnp.broadcast_to(x, (*batch, *x.shape[-3:]))
        return jnp.reshape(x, (math.prod(batch), *x.shape[-3:]))

    outputs = jax.nn.dot_product_attention(
        with_one_batch_axis(query),
        with_one_batch_axis(key),
        with_one_batch_axis(value),
        None if bias is None else with_one_batch_axis(bias),
        None if mask is None else with_one_batch_axis(mask.astype(bool)),
        is_causal=is_causal,
        implementation=implementation,
        **arguments.if_set(
            scale=scale,
            # JAX counts the tokens before and after a token, without itself.
            local_window_size=None
            if sliding_window is None
            else (sliding_window - 1, 0),
            key_value_seq_lengths=None if lengths is None else lengths.reshape(-1),
        ),
    )
    return jnp.reshape(outputs, query.shape)


_attend = eager.compiled(_attend_as_it_is)


def _logits(
    query: jax.Array,
    key: jax.Array,
    scale: float | jax.Array | None,
    precision: PrecisionLike,
) -> jax.Array:
    """Computes scaled dot products, ``[*batch, heads, queries, keys]``."""
    shape = _weights_shape(query, key)
    dtype, wide = query.dtype, arithmetic.wide_dtype(query.dtype, jnp.float32)
    if scale is None:
        query = query / math.sqrt(query.shape[-1])
    query = _grouped(query, key.shape[-2], axis=-2)
    logits = jnp.einsum(
        "...qhgd,...khd->...hgqk",
        query,
        key,
        precision=precision,
        # As JAX's function does; in half precision the softmax would lose most digits.
        **arguments.if_set(preferred_element_type=None if wide == dtype else wide),
    )
    # As in JAX's function; the softmax of complex numbers would be none.
    logits = jnp.reshape(_real(logits), shape)
    # Here it is not rounded to half precision.
    return logits if scale is None else logits * jnp.asarray(scale, logits.dtype)


def _real(x: jax.Array) -> jax.Array:
    return jnp.real(x) if jnp.iscomplexobj(x) else x


def _capped(logits: jax.Array, cap: Any) -> jax.Array:
    """Squeezes logits into ``-cap .. cap``; small ones stay nearly as they are."""
    if cap is None:
        return logits
    if isinstance(cap, (int, float)) and not cap > 0:
        raise ValueError(f"logits_soft_cap must be positive, or None, got {cap}.")
    cap = jnp.asarray(cap, logits.dtype)
    return cap * jnp.tanh(logits / cap)


def _visible(
    shape: Shape,
    mask: jax.Array | None,
    is_causal: bool,
    window: int | None,
    lengths: jax.Array | None,
) -> jax.Array | None:
    """Combines masks: which keys each query sees; ``None``: all."""
    rules = [] if mask is None else [mask.astype(bool)]
    ones = (1,) * (len(shape) - 2)
    if is_causal:
        causal = jnp.tril(jnp.ones(shape[-2:], bool))
        if window is not None:
            causal = jnp.triu(causal, 1 - window)
        rules.append(jnp.reshape(causal, (*ones, *shape[-2:])))
    if lengths is not None:
        slots = jnp.reshape(jnp.arange(shape[-1]), (*ones, 1, shape[-1]))
        rules.append(slots < lengths[..., None, None, None])
    return functools.reduce(jnp.logical_and, rules) if rules else None


def _softmax(logits: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Computes the softmax over keys and a sink, without the share of the sink."""
    if sinks is None:
        return jax.nn.softmax(logits)
    sinks = sinks.astype(logits.dtype)
    top = jnp.maximum(logits.max(axis=-1, keepdims=True), sinks)
    top = jax.lax.stop_gradient(top)
    parts = jnp.exp(logits - top)
    return parts / (parts.sum(axis=-1, keepdims=True) + jnp.exp(sinks - top))


def _drop(weights: jax.Array, key: jax.Array, rate: float, shape: Shape) -> jax.Array:
    """Drops weights, those that differ only along axes of size one together."""
    is_kept = jax.random.bernoulli(key, 1.0 - rate, shape).astype(weights.dtype)
    return weights * (is_kept / jnp.asarray(1.0 - rate, weights.dtype))


def _average(
    weights: jax.Array, value: jax.Array, precision: PrecisionLike
) -> jax.Array:
    """Averages values with the weights."""
    weights = _grouped(weights, value.shape[-2], axis=-3)
    outputs = jnp.einsum("...hgqk,...khd->...qhgd", weights, value, precision=precision)
    *batch, heads, groups, depth = outputs.shape
    return jnp.reshape(outputs, (*batch, heads * groups, depth))


def _grouped(x: jax.Array, heads: int, axis: int) -> jax.Array:
    """Splits the axis of query heads into ``[heads, query heads per head]``."""
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    return jnp.reshape(x, (*before, heads, x.shape[axis] // heads, *after))


def make_attention_mask(
    query_input: Shaped[ArrayLike, "*batch queries"],
    key_input: Shaped[ArrayLike, "*batch keys"],
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
        pairwise_fn: Decides which pairs may meet; called with two arrays that broadcast
            against each other. By default, pairs of two nonzero entries.
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
    pairs = jax_functions.current(pairwise_fn)(
        jnp.expand_dims(query_input, axis=-1), jnp.expand_dims(key_input, axis=-2)
    )
    mask = jnp.expand_dims(pairs, (*range(extra_batch_dims), -3))
    return mask.astype(dtype)


def make_causal_mask(
    x: Shaped[ArrayLike, "*batch length"],
    extra_batch_dims: int = 0,
    dtype: Dtype = jnp.float32,
) -> Shaped[Array, "*extra_and_batch 1 length length"]:
    """Lets every token see itself and those before it.

    Args:
        x: An array ``[*batch, length]``; only its shape matters.
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
    shape = jnp.shape(x)
    positions = jnp.broadcast_to(jnp.arange(shape[-1]), shape)
    return make_attention_mask(
        positions, positions, jnp.greater_equal, extra_batch_dims, dtype
    )


def combine_masks(
    *masks: Shaped[ArrayLike, "..."] | None, dtype: Dtype = jnp.float32
) -> Shaped[Array, "..."] | None:
    """Combines masks: a query sees a key where all of them allow it.

    Args:
        *masks: Masks of the same rank that broadcast against each other; ``None``
            entries are ignored.
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
    arrays = [jnp.asarray(mask) for mask in masks if mask is not None]
    if not arrays:
        return None
    ranks = tuple(mask.ndim for mask in arrays)
    if len(set(ranks)) > 1:
        raise ValueError(
            f"masks must have same rank, but got {ranks}, with the shapes "
            f"{', '.join(str(mask.shape) for mask in arrays)}.\n"
            "Give each the axes [*batch, heads, query length, key length]; those of "
            "size one broadcast."
        )
    return functools.reduce(jnp.logical_and, arrays).astype(dtype)
