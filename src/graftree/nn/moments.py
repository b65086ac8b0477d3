"""Mean and variance over axes, and their use in normalization layers.

All these layers compute, with statistics over the axes that they reduce,

    y = (x - mean(x)) * (rsqrt(var(x) + epsilon) * scale) + bias

The order of operations is part of the contract: models trained with other libraries
are expected to give the same bits. Statistics are computed in float32 or wider, over
arrays that keep their rank: reduced axes have size one.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from graftree.annotations import Dtype, PromoteDtypeFn
from graftree.core.modules.modules import Module
from graftree.core.variables.kinds import Param
from graftree.nn.support import arguments, meshes


class NormSettings(NamedTuple):
    """The settings of a computation; the attributes are those of the layer."""

    promote_dtype: PromoteDtypeFn
    dtype: Dtype | None
    epsilon: float
    use_fast_variance: bool
    axis_name: Any
    axis_index_groups: Any

    def promoted(
        self, x: Any, *params: Any, feature_axes: Sequence[int]
    ) -> tuple[Any, ...]:
        """The operands in one dtype; the Params vary along these axes of ``x``."""
        x, *others = self.promote_dtype((x, *params), dtype=self.dtype)
        return (x, *meshes.beside(x, feature_axes, others))


class Norm(Module):
    """The base of normalization layers: Params along the features, and settings."""

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


def settings_of(layer: Norm) -> NormSettings:
    """The settings of a layer, for functions that are fast."""
    return NormSettings(*_read_settings(layer))


_read_settings = operator.attrgetter(*NormSettings._fields)


def moments(
    x: jax.Array, axes: Sequence[int], mask: jax.Array | None, settings: NormSettings
) -> tuple[jax.Array, jax.Array]:
    """Computes mean and population variance of ``x`` over some of its axes.

    The fast variance is ``max(0, mean(|x|^2) - |mean(x)|^2)``, one pass over ``x``; the
    other is ``mean(|x - mean(x)|^2)``, which loses less where the mean is large.

    The settings choose the variance, and a mapped axis to average over too. Both
    results have the rank of ``x``; the variance of complex numbers is real.
    """
    x = _widen(x, settings)
    if settings.use_fast_variance:
        mean, square = _means((x, _abs_square(x)), axes, mask, settings)
        return mean, jnp.maximum(0.0, square - _abs_square(mean))
    (mean,) = _means((x,), axes, mask, settings)
    (deviation,) = _means((_abs_square(x - mean),), axes, mask, settings)
    return mean, deviation


def mean_square(
    x: jax.Array, axes: Sequence[int], mask: jax.Array | None, settings: NormSettings
) -> jax.Array:
    """Computes the mean of ``|x|^2`` over some axes; arguments as for `moments`."""
    square = _abs_square(_widen(x, settings))
    (mean,) = _means((square,), axes, mask, settings)
    return mean


def _widen(x: jax.Array, settings: NormSettings) -> jax.Array:
    """Casts ``x`` to the dtype that statistics are computed in."""
    dtype = jnp.result_type(x) if settings.dtype is None else settings.dtype
    return jnp.asarray(x, arguments.wide_dtype(dtype, jnp.float32))


def _abs_square(x: jax.Array) -> jax.Array:
    """Computes ``|x|^2``, real also for complex ``x``."""
    if jnp.iscomplexobj(x):
        return lax.square(lax.real(x)) + lax.square(lax.imag(x))
    return jnp.square(x)


def _means(
    values: Sequence[jax.Array],
    axes: Sequence[int],
    mask: jax.Array | None,
    settings: NormSettings,
) -> Sequence[jax.Array]:
    """The means of arrays over some axes, and over a mapped axis if there is one.

    They have the same shape. A mask may count less in one part of the mapped axis than
    in another, so there sums and counts are added, in one collective.
    """
    if mask is None:  # not passed on: jax2onnx has no mean with a mask, not even None
        means = [jnp.mean(x, axes, keepdims=True) for x in values]
        return (
            means
            if settings.axis_name is None
            else _over_axis(lax.pmean, means, settings)
        )
    if settings.axis_name is None:
        return [jnp.mean(x, axes, keepdims=True, where=mask) for x in values]
    sums = [jnp.sum(x, axes, keepdims=True, where=mask) for x in values]
    counted = jnp.broadcast_to(mask, values[0].shape)
    count = jnp.sum(counted, axes, keepdims=True, dtype=jnp.float32)
    *sums, count = _over_axis(lax.psum, [*sums, count], settings)
    return [x / count.astype(x.dtype) for x in sums]


def _over_axis(reduce: Any, values: Any, settings: NormSettings) -> Any:
    name, groups = settings.axis_name, settings.axis_index_groups
    try:
        return reduce(values, name, axis_index_groups=groups)
    except NameError as error:
        error.add_note(
            f"This layer has axis_name={name!r}: it averages over an axis that a "
            f"transform around it maps.\nCall it within nnx.vmap(..., "
            f"axis_name={name!r}), or make it without axis_name; a BatchNorm in "
            "evaluation, after model.eval(), needs no axis."
        )
        raise


def normalize(
    x: jax.Array,
    mean: jax.Array | None,
    variance: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    feature_axes: Sequence[int],
    settings: NormSettings,
) -> jax.Array:
    """Computes ``(x - mean) * (rsqrt(variance + epsilon) * scale) + bias``.

    Mean and variance have the rank of ``x``; scale and bias are flat, and vary along
    the ``feature_axes`` of ``x``. Any that is ``None`` is left out.
    """
    dtype = arguments.canonicalize_dtype(x, scale, bias, dtype=settings.dtype)
    shape = arguments.shape_along(feature_axes, x.shape)
    y = x if mean is None else operator.sub(*arguments.alike(x, mean))
    multiplier = lax.rsqrt(variance + settings.epsilon)
    if scale is not None:
        factors = arguments.alike(multiplier, jnp.reshape(scale, shape))
        multiplier = operator.mul(*factors)
    y = operator.mul(*arguments.alike(y, multiplier))
    if bias is not None:
        y = operator.add(*arguments.alike(y, jnp.reshape(bias, shape)))
    return jnp.asarray(y, dtype)


def prepare_mask(mask: Any, x: jax.Array) -> jax.Array | None:
    """Gives a mask, true where a position counts, the rank of ``x``."""
    if mask is None:
        return None
    mask = jnp.asarray(mask)
    if mask.dtype != bool:
        raise ValueError("mask must be boolean; pass `mask != 0` to make it so.")
    return mask.reshape((1,) * (x.ndim - mask.ndim) + mask.shape)


def split_mask(
    mask: jax.Array, axes: tuple[int, ...], settings: NormSettings
) -> tuple[jax.Array, jax.Array]:
    """A mask that leaves no feature empty, and the features that have statistics.

    An empty mean is 0 / 0, with a NaN gradient even where it is not selected. So where
    no position counts, let all count, and mark the result as void.
    """
    is_known = jnp.any(mask, axes, keepdims=True)
    if settings.axis_name is not None:
        is_known = _over_axis(lax.psum, is_known.astype(jnp.int32), settings) > 0
    return mask | ~is_known, is_known
