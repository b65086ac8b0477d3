"""Functions of Flax's ``nn.normalization`` from which people build norms of their own.

Batch renormalization, a norm for each head, a LayerNorm whose scale is an offset: they
compute statistics with the first and apply them with the second. The arithmetic is that
of this package's norms, in ``nn.moments``; statistics come without the reduced axes.
"""

from __future__ import annotations

import types
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from graftree.annotations import Axes, Dtype
from graftree.nn import moments
from graftree.nn.support import arguments, arithmetic


def canonicalize_axes(rank: int, axes: Axes) -> tuple[int, ...]:
    """Lists axes of an array as non-negative numbers, ascending, without repeats.

    Args:
        rank: The number of axes of the array.
        axes: One axis, or several; negative ones count from the end.

    Raises:
        ValueError: If there is no such axis.

    Example:
        >>> nnx.nn.normalization._canonicalize_axes(4, (-1, 1))
        (1, 3)
    """
    return arguments.canonical_axes(axes, rank)


def compute_stats(
    x: Any,
    axes: Axes,
    dtype: Dtype | None,
    axis_name: Any = None,
    axis_index_groups: Any = None,
    use_mean: bool = True,
    use_fast_variance: bool = True,
    mask: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes mean and population variance over some axes.

    Args:
        x: An array, ``[*shape]``.
        axes: The axes to reduce.
        dtype: The dtype of the statistics, at least float32; ``None``: that of ``x``.
        axis_name: A mapped axis to average over too.
        axis_index_groups: Groups of indices of that axis to average in.
        use_mean: Whether there is a mean; otherwise it is zero, and the variance is the
            mean square.
        use_fast_variance: Whether to compute the variance as ``mean(x^2) - mean(x)^2``.
        mask: Booleans, broadcastable to ``x``: the positions that count.

    Returns:
        Mean and variance, with the shape of ``x`` without ``axes``.

    Example:
        >>> nnx.nn.normalization._compute_stats(jnp.array([[1.0, 3.0]]), -1, None)
        (Array([2.], dtype=float32), Array([1.], dtype=float32))
    """
    x = arguments.as_array(x)
    axes = arguments.canonical_axes(axes, x.ndim)
    mask = moments.prepare_mask(mask, x)
    layer: Any = types.SimpleNamespace(
        dtype=dtype,
        axis_name=axis_name,
        axis_index_groups=axis_index_groups,
        use_fast_variance=use_fast_variance,
    )
    if use_mean:
        mean, variance = moments.moments(layer, x, axes, mask)
    else:
        variance = moments.mean_square(layer, x, axes, mask)
        mean = jnp.zeros_like(variance)
    return jnp.squeeze(mean, axes), jnp.squeeze(variance, axes)


def normalize(
    x: Any,
    mean: Any,
    var: Any,
    scale: Any,
    bias: Any,
    reduction_axes: Axes,
    feature_axes: Axes,
    dtype: Dtype | None,
    epsilon: float,
) -> jax.Array:
    """Computes ``(x - mean) * (rsqrt(var + epsilon) * scale) + bias``.

    Args:
        x: An array, ``[*shape]``.
        mean: The mean, with the shape of ``x`` without ``reduction_axes``.
        var: The variance, with the same shape.
        scale: Gains with the shape of ``x`` along ``feature_axes``; ``None``: ones.
        bias: Offsets with that shape; ``None``: zeros.
        reduction_axes: The axes over which mean and variance were computed.
        feature_axes: The axes along which scale and bias differ.
        dtype: The dtype of the result; ``None``: inferred from inputs and Params.
        epsilon: Added to the variance.

    Returns:
        A new array of the shape of ``x``.

    Example:
        >>> x = jnp.array([[1.0, 3.0]])
        >>> mean, var = nnx.nn.normalization._compute_stats(x, -1, None)
        >>> nnx.nn.normalization._normalize(x, mean, var, None, None, -1, -1, None, 0.0)
        Array([[-1.,  1.]], dtype=float32)
    """
    x = arguments.as_array(x)
    dtype = arguments.canonicalize_dtype(x, scale, bias, dtype=dtype)
    reduced = arguments.canonical_axes(reduction_axes, x.ndim)
    features = arguments.canonical_axes(feature_axes, x.ndim)
    mean, var = jnp.expand_dims(mean, reduced), jnp.expand_dims(var, reduced)
    scale, bias = moments.along(features, x.shape, scale, bias)
    factor = arithmetic.times(lax.rsqrt(var + epsilon), scale)
    y = arithmetic.times(arithmetic.minus(x, mean), factor)
    return jnp.asarray(arithmetic.plus(y, bias), dtype)
