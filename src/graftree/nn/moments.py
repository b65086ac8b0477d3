"""Mean and variance over axes, and what normalization layers do with them.

All these layers compute, with statistics over the axes that they reduce,

    y = (x - mean(x)) * (rsqrt(var(x) + epsilon) * scale) + bias

The order of operations is part of the contract: models trained with other libraries
are expected to give the same bits. Statistics are computed in float32 or wider, over
arrays that keep their rank: reduced axes have size one.

``layer`` is always the one that computes, whose settings the functions read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from graftree.annotations import Dtype, PromoteDtypeFn
from graftree.core.modules.modules import Module
from graftree.core.variables.variables import Variable
from graftree.nn.support import computation


class Norm(Module):
    """The settings that all normalization layers have."""

    dtype: Dtype | None
    epsilon: float
    axis_name: Any
    axis_index_groups: Any
    use_fast_variance: bool
    promote_dtype: PromoteDtypeFn


def promote(
    layer: Norm, x: jax.Array, *variables: Variable[jax.Array] | None
) -> tuple[Any, ...]:
    """Brings inputs and Variables to one dtype."""
    operands = (x, *map(computation.read, variables))
    return layer.promote_dtype(operands, dtype=layer.dtype)


def moments(
    layer: Norm, x: jax.Array, axes: Sequence[int], mask: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Computes mean and population variance of ``x`` over some of its axes.

    The fast variance is ``max(0, mean(|x|^2) - |mean(x)|^2)``, one pass over ``x``; the
    other is ``mean(|x - mean(x)|^2)``, which loses less where the mean is large.

    The layer says which, and which mapped axis to average over, too. Both results have
    the rank of ``x``; the variance of complex numbers is real.
    """
    x = _widen(layer, x)
    if layer.use_fast_variance:
        mean, square = average_over(
            layer, (_mean(x, axes, mask), _mean(_abs_square(x), axes, mask))
        )
        return mean, jnp.maximum(0.0, square - _abs_square(mean))
    mean = average_over(layer, _mean(x, axes, mask))
    deviation = _mean(_abs_square(x - mean), axes, mask)
    return mean, average_over(layer, deviation)


def mean_square(
    layer: Norm, x: jax.Array, axes: Sequence[int], mask: jax.Array | None = None
) -> jax.Array:
    """Computes the mean of ``|x|^2`` over some axes; arguments as for `moments`."""
    square = _abs_square(_widen(layer, x))
    return average_over(layer, _mean(square, axes, mask))


def _widen(layer: Norm, x: jax.Array) -> jax.Array:
    """Casts ``x`` to the dtype that statistics are computed in."""
    if layer.dtype is None and computation.common_dtype(x) == jnp.float32:
        return x
    dtype = jnp.result_type(x) if layer.dtype is None else layer.dtype
    return jnp.asarray(x, jnp.promote_types(dtype, jnp.float32))


def _abs_square(x: jax.Array) -> jax.Array:
    """Computes ``|x|^2``, real also for complex ``x``."""
    if jnp.iscomplexobj(x):
        return lax.square(lax.real(x)) + lax.square(lax.imag(x))
    return jnp.square(x)


def _mean(x: jax.Array, axes: Sequence[int], mask: jax.Array | None) -> jax.Array:
    if mask is None:  # not passed on: jax2onnx has no mean with a mask, not even None
        return jnp.mean(x, axes, keepdims=True)
    return jnp.mean(x, axes, keepdims=True, where=mask)


def average_over(layer: Norm, values: Any) -> Any:
    """Averages arrays over the layer's mapped axis, if any, in one collective."""
    if layer.axis_name is None:
        return values
    return lax.pmean(values, layer.axis_name, axis_index_groups=layer.axis_index_groups)


def normalize(
    layer: Norm,
    x: jax.Array,
    mean: jax.Array | None,
    variance: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    feature_axes: Sequence[int],
) -> jax.Array:
    """Computes ``(x - mean) * (rsqrt(variance + epsilon) * scale) + bias``.

    Mean and variance have the rank of ``x``; scale and bias are flat, and vary along
    the ``feature_axes`` of ``x``. What is ``None`` is left out.
    """
    dtype = computation.common_dtype(x, scale, bias) if layer.dtype is None else None
    if dtype is None:
        dtype = computation.canonicalize_dtype(x, scale, bias, dtype=layer.dtype)
    shape = computation.shape_along(feature_axes, x.shape)
    y = x if mean is None else x - mean
    multiplier = _rsqrt(variance + layer.epsilon)
    if scale is not None:
        multiplier = computation.times(multiplier, scale, shape=shape)
    y *= multiplier
    if bias is not None:
        y = computation.plus(y, bias, shape=shape)
    return y if computation.common_dtype(y) == dtype else jnp.asarray(y, dtype)


@computation.one_program(calls=["lax.rsqrt"])
def _rsqrt(x: jax.Array) -> jax.Array:
    """The root's inverse, by what JAX has for it now."""
    return lax.rsqrt(x)


def prepare_mask(mask: Any, x: jax.Array) -> jax.Array | None:
    """Gives a mask, true where a position counts, the rank of ``x``."""
    if mask is None:
        return None
    mask = jnp.asarray(mask)
    if mask.dtype != bool:
        raise ValueError("mask must be boolean; pass `mask != 0` to make it so.")
    return mask.reshape((1,) * (x.ndim - mask.ndim) + mask.shape)
