"""Mean and variance over axes, and their use in normalization layers.

All these layers compute, with statistics over the axes that they reduce,

    y = (x - mean(x)) * (rsqrt(var(x) + epsilon) * scale) + bias

The order of operations is part of the contract: models trained with other libraries
are expected to give the same bits. Statistics are computed in float32 or wider, over
arrays that keep their rank: reduced axes have size one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from graftree.annotations import Dtype, Initializer, PromoteDtypeFn, Shape
from graftree.core.modules.modules import Module
from graftree.core.variables.kinds import Param
from graftree.nn import initializers
from graftree.nn.support import arguments, arithmetic, meshes


class Norm(Module):
    """Base of normalization layers: Params along the features, and settings."""

    scale: Param[jax.Array] | None
    bias: Param[jax.Array] | None
    epsilon: float
    dtype: Dtype | None
    param_dtype: Dtype
    use_bias: bool
    use_scale: bool
    axis_name: Any
    axis_index_groups: Any
    use_fast_variance: bool
    promote_dtype: PromoteDtypeFn
    scale_offset: float = 0.0


def scale_init(initializer: Initializer, offset: float) -> Initializer:
    """The initializer of a scale: with its offset, a default makes it a one."""
    if offset and initializer is initializers.ones:
        return initializers.constant(1 - offset)
    return initializer


def with_offset(layer: Norm, scale: jax.Array | None, dtype: Dtype) -> Any:
    """Adds the offset of a scale, in a dtype no narrower than the statistics."""
    if scale is None or not layer.scale_offset:
        return scale
    return layer.scale_offset + scale.astype(jnp.promote_types(scale.dtype, dtype))


def promoted(
    layer: Norm, feature_axes: Sequence[int], x: Any, *params: Any
) -> tuple[Any, ...]:
    """Casts operands to one dtype; the Params vary along ``feature_axes``."""
    x, *others = layer.promote_dtype((x, *params), dtype=layer.dtype)
    return (x, *meshes.beside(x, feature_axes, others))


def moments(
    layer: Norm, x: jax.Array, axes: Sequence[int], mask: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Computes mean and population variance of ``x`` over some of its axes.

    The fast variance is ``max(0, mean(|x|^2) - |mean(x)|^2)``, one pass over ``x``; the
    other is ``mean(|x - mean(x)|^2)``, which loses less where the mean is large.

    The layer chooses the variance, and a mapped axis to average over too. Both results
    have the rank of ``x``; the variance of complex numbers is real.
    """
    x = _widened(layer, x)
    if layer.use_fast_variance:
        mean, square = _means(layer, (x, _abs_square(x)), axes, mask)
        return mean, jnp.maximum(0.0, square - _abs_square(mean))
    (mean,) = _means(layer, (x,), axes, mask)
    (deviation,) = _means(layer, (_abs_square(x - mean),), axes, mask)
    return mean, deviation


def mean_square(
    layer: Norm, x: jax.Array, axes: Sequence[int], mask: jax.Array | None
) -> jax.Array:
    """Computes the mean of ``|x|^2`` over some axes; arguments as for `moments`."""
    square = _abs_square(_widened(layer, x))
    (mean,) = _means(layer, (square,), axes, mask)
    return mean


def _widened(layer: Norm, x: jax.Array) -> jax.Array:
    """Casts ``x`` to the dtype that statistics are computed in."""
    dtype = jnp.result_type(x) if layer.dtype is None else layer.dtype
    return jnp.asarray(x, arithmetic.wide_dtype(dtype, jnp.float32))


def _abs_square(x: jax.Array) -> jax.Array:
    """Computes ``|x|^2``, real also for complex ``x``."""
    if jnp.iscomplexobj(x):
        return lax.square(lax.real(x)) + lax.square(lax.imag(x))
    return jnp.square(x)


def _means(
    layer: Norm,
    arrays: Sequence[jax.Array],
    axes: Sequence[int],
    mask: jax.Array | None,
) -> Sequence[jax.Array]:
    """Averages arrays over some axes, and over a mapped axis if there is one.

    They have the same shape. A mask may count less in one part of the mapped axis than
    in another, so there sums and counts are added, in one collective.
    """
    if mask is None:  # not passed on: jax2onnx has no mean with a mask, not even None
        means = [jnp.mean(x, axes, keepdims=True) for x in arrays]
        return means if layer.axis_name is None else _over_axis(layer, lax.pmean, means)
    if layer.axis_name is None:
        return [jnp.mean(x, axes, keepdims=True, where=mask) for x in arrays]
    sums = [jnp.sum(x, axes, keepdims=True, where=mask) for x in arrays]
    counted = jnp.broadcast_to(mask, arrays[0].shape)
    count = jnp.sum(counted, axes, keepdims=True, dtype=jnp.float32)
    *sums, count = _over_axis(layer, lax.psum, [*sums, count])
    return [x / count.astype(x.dtype) for x in sums]


def _over_axis(layer: Norm, reduce: Any, arrays: Any) -> Any:
    """Reduces arrays over the mapped axis of a layer."""
    name, groups = layer.axis_name, layer.axis_index_groups
    try:
        return reduce(arrays, name, axis_index_groups=groups)
    except NameError as error:
        error.add_note(
            f"This layer has axis_name={name!r}: it averages over an axis that a "
            f"surrounding transform maps.\nCall it within nnx.vmap(..., "
            f"axis_name={name!r}), or make it without axis_name. A BatchNorm in "
            "evaluation mode, after model.eval(), needs no axis."
        )
        raise


def along(
    feature_axes: Sequence[int], shape: Shape, *params: jax.Array | None
) -> list[Any]:
    """Flat arrays in the rank of a shape, along these axes of it. ``None`` stays."""
    full = arguments.shape_along(feature_axes, shape)
    return [None if x is None else jnp.reshape(x, full) for x in params]


def prepare_mask(mask: Any, x: jax.Array) -> jax.Array | None:
    """Gives a mask, true where a position counts, the rank of ``x``."""
    if mask is None:
        return None
    mask = jnp.asarray(mask)
    if mask.dtype != bool:
        raise ValueError("mask must be boolean; pass `mask != 0` to make it so.")
    return mask.reshape((1,) * (x.ndim - mask.ndim) + mask.shape)


def split_mask(
    layer: Norm, mask: jax.Array, axes: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """A mask that leaves no feature empty, and the features that have statistics.

    An empty mean is 0 / 0, with a NaN gradient even where it is not selected. So where
    no position counts, let all count, and mark the result as void.
    """
    is_known = jnp.any(mask, axes, keepdims=True)
    if layer.axis_name is not None:
        is_known = _over_axis(layer, lax.psum, is_known.astype(jnp.int32)) > 0
    return mask | ~is_known, is_known


def where_known(
    is_known: jax.Array | None, arrays: Sequence[jax.Array], others: Sequence[jax.Array]
) -> Sequence[jax.Array]:
    """Replaces arrays by others where they are not known."""
    if is_known is None:
        return arrays
    return [jnp.where(is_known, *pair) for pair in zip(arrays, others, strict=True)]


def moved(
    old: jax.Array, current: jax.Array, is_known: jax.Array | None, momentum: float
) -> jax.Array:
    """Moves a running statistic towards the present one, where that is known."""
    new = momentum * old + jnp.reshape((1 - momentum) * current, old.shape)
    if is_known is not None:
        is_known = jnp.broadcast_to(is_known, current.shape).reshape(old.shape)
        new = jnp.where(is_known, new, old)
    if jnp.iscomplexobj(new) and not jnp.iscomplexobj(old):
        new = jnp.real(new)
    # Stored gradients would leak out of transforms through array refs.
    return lax.stop_gradient(new).astype(old.dtype)
