"""Normalization layers, which differ in the axes that they average over.

``BatchNorm`` averages over all axes but the features, and remembers the averages;
``LayerNorm`` and ``RMSNorm`` over the features of each sample, ``InstanceNorm`` over
its positions, ``GroupNorm`` over its positions and a group of features. The arithmetic
is in ``moments``. State is written last: a failed call changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from graftree.annotations import (
    Array,
    ArrayLike,
    Axes,
    Bool,
    Dtype,
    Inexact,
    Initializer,
    Num,
    PromoteDtypeFn,
)
from graftree.core.rng.streams import Rngs
from graftree.core.variables import sharding
from graftree.core.variables.kinds import BatchStat
from graftree.nn import initializers, moments
from graftree.nn.support import arguments, eager


class BatchNorm(moments.Norm):
    """Normalizes each feature over the batch, and remembers the statistics.

    While training (``use_running_average=False``), a call uses mean and variance of its
    inputs over all axes but ``axis``, and moves the running statistics towards them:
    ``running = momentum * running + (1 - momentum) * current``. Otherwise it uses the
    running statistics and changes nothing.

    Args:
        num_features: Size of the inputs along ``axis``.
        use_running_average: Whether to use the running statistics; ``None``: each call
            must say.
        axis: The feature axis, or axes.
        momentum: How much of the running statistics a training call keeps.
        epsilon: Added to the variance.
        dtype: The dtype of the output; ``None``: inferred from inputs and Params.
        param_dtype: The dtype in which the Params are stored.
        use_bias: Whether there is a bias.
        use_scale: Whether there is a scale.
        bias_init: Initializer of ``bias``.
        scale_init: Initializer of ``scale``.
        axis_name: A mapped axis (of ``vmap``, ``pmap``, ``shard_map``) to also average
            the statistics over.
        axis_index_groups: Groups of indices of that axis to average in.
        use_fast_variance: Whether to compute the variance as ``mean(x^2) - mean(x)^2``.
        promote_dtype: Called as ``promote_dtype((x, mean, var, scale, bias),
            dtype=dtype)``.
        rngs: Gives one key to ``scale``, then one to ``bias``.
        bias_metadata: Metadata of the Param ``bias``.
        scale_metadata: Metadata of the Param ``scale``.

    Attributes:
        mean: BatchStat, ``[num_features]``, float32: the running mean, initially zeros.
        var: BatchStat, ``[num_features]``, float32: the running population variance,
            initially ones.
        scale: Param, ``[num_features]``, or ``None``.
        bias: Param, ``[num_features]``, or ``None``.

    Raises:
        AttributeError: If ``rngs`` has no stream ``params``.

    Example:
        >>> layer = nnx.BatchNorm(1, momentum=0.9, rngs=nnx.Rngs(0))
        >>> x = jnp.array([[1.0], [3.0]])
        >>> layer(x).round(2).ravel(), layer.mean[...]
        (Array([-1.,  1.], dtype=float32), Array([0.2], dtype=float32))
        >>> layer.eval()
        >>> layer(jnp.array([[0.2]]))
        Array([[0.]], dtype=float32)

    References:
        Ioffe and Szegedy, 2015, "Batch Normalization", algorithm 1.
    """

    num_features: int
    use_running_average: bool | None
    axis: Axes
    momentum: float

    def __init__(
        self,
        num_features: int,
        *,
        use_running_average: bool | None = False,
        axis: Axes = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-5,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = initializers.zeros,
        scale_init: Initializer = initializers.ones,
        axis_name: Any = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = arguments.promote_dtype,
        rngs: Rngs,
        bias_metadata: Mapping[str, Any] = arguments.NO_METADATA,
        scale_metadata: Mapping[str, Any] = arguments.NO_METADATA,
    ):
        arguments.check_sizes(self, num_features=num_features)
        self.mean = BatchStat(jnp.zeros((num_features,), jnp.float32))
        self.var = BatchStat(jnp.ones((num_features,), jnp.float32))
        _set_up(self, locals())

    def __call__(
        self,
        x: Num[ArrayLike, "*shape"],
        use_running_average: bool | None = None,
        *,
        mask: Bool[ArrayLike, "*mask_shape"] | None = None,
    ) -> Inexact[Array, "*shape"]:
        """Normalizes ``x``; while training, updates the running statistics.

        Args:
            x: Inputs, with ``num_features`` entries along ``axis``. If they are
                complex, the running mean keeps only its real part.
            use_running_average: Overrides the attribute, if not ``None``.
            mask: Booleans, broadcastable to ``x``: the positions that count in the
                statistics. A feature without such positions is normalized with its
                running statistics, which do not change.

        Returns:
            A new array of the shape of ``x``.

        Raises:
            ValueError: If neither the call nor the attribute says whether to use the
                running statistics, if ``axis`` does not exist, if ``mask`` is not
                boolean or can't be broadcast to ``x``, or if ``dtype`` is neither
                floating nor complex. The statistics are then unchanged.
            TypeError: If ``x`` has the wrong number of features or is not numeric. The
                statistics are then unchanged too.
        """
        use_running_average = arguments.setting(
            self, "use_running_average", use_running_average
        )
        inputs = arguments.as_array(x)
        counts = None if use_running_average else moments.prepare_mask(mask, inputs)
        y, *news = _normalized_over_batch(
            inputs,
            self.mean[...],
            self.var[...],
            arguments.read(self.scale),
            arguments.read(self.bias),
            counts,
            feature_axes=arguments.canonical_axes(self.axis, inputs.ndim),
            use_running_average=use_running_average,
            momentum=self.momentum,
            settings=moments.settings_of(self),
        )
        if news:
            olds = self.mean[...], self.var[...]
            self.mean[...], self.var[...] = map(sharding.kept, news, olds)
        return y

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Sets how the view's layer works.

        Args:
            use_running_average: Whether to use the running statistics instead of those
                of the inputs, and to leave them unchanged.
        """
        if use_running_average is not None:
            self.use_running_average = use_running_average


def _set_up(layer: moments.Norm, given: Mapping[str, Any]) -> None:
    """Makes scale and bias, and keeps the other arguments of a constructor."""
    arguments.check_sizes(layer, num_features=given["num_features"])
    names = [name for name in ("scale", "bias") if f"use_{name}" in given]
    arguments.make(layer, given, **dict.fromkeys(names, (given["num_features"],)))
    arguments.keep(layer, given)


@eager.fast("norm")
def _normalized_over_batch(
    x: jax.Array,
    mean: jax.Array,
    variance: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    mask: jax.Array | None,
    *,
    feature_axes: tuple[int, ...],
    use_running_average: bool,
    momentum: float,
    settings: moments.NormSettings,
) -> tuple[jax.Array, ...]:
    """The outputs, and running mean and variance if they are not used but moved."""
    olds = mean, variance
    x, mean, variance, scale, bias = settings.promoted(
        x, mean, variance, scale, bias, feature_axes=feature_axes
    )
    shape = arguments.shape_along(feature_axes, x.shape)
    axes = tuple(axis for axis in range(x.ndim) if axis not in feature_axes)
    is_known = None
    if use_running_average:
        mean, variance = jnp.reshape(mean, shape), jnp.reshape(variance, shape)
    elif mask is None:
        mean, variance = moments.moments(x, axes, None, settings)
    else:
        mask, is_known = moments.split_mask(mask, axes, settings)
        current = moments.moments(x, axes, mask, settings)
        mean = jnp.where(is_known, current[0], jnp.reshape(mean, shape))
        variance = jnp.where(is_known, current[1], jnp.reshape(variance, shape))
    y = moments.normalize(x, mean, variance, scale, bias, feature_axes, settings)
    if use_running_average:
        return (y,)
    news = zip(olds, (mean, variance), strict=True)
    return (y, *(_moved(old, new, is_known, momentum) for old, new in news))


def _moved(
    old: jax.Array, current: jax.Array, is_known: jax.Array | None, momentum: float
) -> jax.Array:
    """A running statistic, moved towards the present one where that is known."""
    new = momentum * old + jnp.reshape((1 - momentum) * current, old.shape)
    if is_known is not None:
        is_known = jnp.broadcast_to(is_known, current.shape).reshape(old.shape)
        new = jnp.where(is_known, new, old)
    if jnp.iscomplexobj(new) and not jnp.iscomplexobj(old):
        new = jnp.real(new)
    # Stored gradients would leak out of transforms through array refs.
    return jax.lax.stop_gradient(new).astype(old.dtype)


class _Axes(NamedTuple):
    """What a norm without running statistics computes over.

    Attributes:
        averaged: The axes of the statistics.
        features: Those along which scale and bias vary.
        groups: Number and size of groups that split the last axis in two, before the
            others are counted; ``None``: it stays whole.
    """

    averaged: tuple[int, ...]
    features: tuple[int, ...]
    groups: tuple[int, int] | None = None


class _SampleNorm(moments.Norm):
    """The base of norms without running statistics, which differ in their axes."""

    reduction_axes: Any
    feature_axes: Axes
    _is_centered: ClassVar[bool] = True
    """Whether the mean is subtracted, and a bias added."""

    def __call__(
        self,
        x: Num[ArrayLike, "*shape"],
        *,
        mask: Bool[ArrayLike, "*mask_shape"] | None = None,
    ) -> Inexact[Array, "*shape"]:
        """Normalizes ``x``.

        Args:
            x: Inputs of any shape that fits the axes of the layer; for `InstanceNorm`
                with the samples along the first axis; for `GroupNorm` ``[batch,
                *positions, num_features]``, or ``[num_features]``.
            mask: Booleans, broadcastable to ``x``: the positions that count in the
                statistics.

        Returns:
            A new array of the shape of ``x``.

        Raises:
            TypeError: If ``x`` has the wrong number of features or is not numeric.
            ValueError: If an axis does not exist, if the ``feature_axes`` of an
                `InstanceNorm` include the first axis, if the ``reduction_axes`` of a
                `GroupNorm` lack the last one, if ``mask`` is not boolean or can't be
                broadcast to ``x``, or if ``dtype`` is neither floating nor complex.
        """
        return self._applied(x, mask)

    def _applied(self, x: Any, mask: Any) -> jax.Array:
        x = arguments.as_array(x)
        return _normalized(
            x,
            arguments.read(self.scale),
            arguments.read(getattr(self, "bias", None)),
            moments.prepare_mask(mask, x),
            axes=self._axes(x.ndim),
            is_centered=self._is_centered,
            settings=moments.settings_of(self),
        )

    def _axes(self, ndim: int) -> _Axes:
        """The axes of inputs with this rank."""
        return _Axes(
            arguments.canonical_axes(self.reduction_axes, ndim),
            arguments.canonical_axes(self.feature_axes, ndim),
        )


@eager.fast("norm")
def _normalized(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    mask: jax.Array | None,
    *,
    axes: _Axes,
    is_centered: bool,
    settings: moments.NormSettings,
) -> jax.Array:
    """Normalizes ``x`` with the statistics of its own entries."""
    if is_centered:
        x, scale, bias = settings.promoted(x, scale, bias, feature_axes=axes.features)
    else:
        x, scale = settings.promoted(x, scale, feature_axes=axes.features)
    y = x
    if axes.groups is not None:
        size = axes.groups[0] * axes.groups[1]
        if x.shape[-1:] != (size,):  # empty arrays have room for any groups
            raise TypeError(f"GroupNorm expects {size} features, got {x.shape[-1:]}.")
        y = jnp.reshape(x, (*x.shape[:-1], *axes.groups))
        if mask is not None:
            mask = jnp.broadcast_to(mask, (*mask.shape[:-1], x.shape[-1]))
            mask = jnp.reshape(mask, (*mask.shape[:-1], *axes.groups))
    if is_centered:
        mean, variance = moments.moments(y, axes.averaged, mask, settings)
    else:
        mean, variance = None, moments.mean_square(y, axes.averaged, mask, settings)
    y = moments.normalize(y, mean, variance, scale, bias, axes.features, settings)
    return jnp.reshape(y, x.shape)


class LayerNorm(_SampleNorm):
    """Normalizes each sample over its features.

    Args:
        num_features: Number of entries of ``scale`` and ``bias``: the size of the
            inputs along ``feature_axes``, the product of sizes if there are several.
        epsilon: Added to the variance.
        dtype: The dtype of the output; ``None``: inferred from inputs and Params.
        param_dtype: The dtype in which the Params are stored.
        use_bias: Whether there is a bias.
        use_scale: Whether there is a scale.
        bias_init: Initializer of ``bias``.
        scale_init: Initializer of ``scale``.
        reduction_axes: The axes to compute the statistics over.
        feature_axes: The axes along which scale and bias vary.
        axis_name: A mapped axis to also average the statistics over.
        axis_index_groups: Groups of indices of that axis to average in.
        use_fast_variance: Whether to compute the variance as ``mean(x^2) - mean(x)^2``.
        promote_dtype: Called as ``promote_dtype((x, scale, bias), dtype=dtype)``.
        rngs: Gives one key to ``scale``, then one to ``bias``.
        bias_metadata: Metadata of the Param ``bias``.
        scale_metadata: Metadata of the Param ``scale``.

    Attributes:
        scale: Param, ``[num_features]``, or ``None``.
        bias: Param, ``[num_features]``, or ``None``.

    Raises:
        AttributeError: If a Param is wanted and ``rngs`` has no stream ``params``.

    Example:
        >>> layer = nnx.LayerNorm(3, rngs=nnx.Rngs(0))
        >>> layer(jnp.array([[0.0, 2.0, 4.0], [7.0, 7.0, 7.0]])).round(2)
        Array([[-1.22,  0.  ,  1.22],
               [ 0.  ,  0.  ,  0.  ]], dtype=float32)

    References:
        Ba, Kiros and Hinton, 2016, "Layer Normalization", eq. 3.
    """

    num_features: int

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = initializers.zeros,
        scale_init: Initializer = initializers.ones,
        reduction_axes: Axes = -1,
        feature_axes: Axes = -1,
        axis_name: Any = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = arguments.promote_dtype,
        rngs: Rngs,
        bias_metadata: Mapping[str, Any] = arguments.NO_METADATA,
        scale_metadata: Mapping[str, Any] = arguments.NO_METADATA,
    ):
        _set_up(self, locals())


class RMSNorm(_SampleNorm):
    """Scales each sample to a mean square of one over its features.

    Computes ``x * (rsqrt(mean(|x|^2) + epsilon) * scale)``: nothing is subtracted, and
    there is no bias.

    Args:
        num_features: Number of entries of ``scale``: the size of the inputs along
            ``feature_axes``, the product of sizes if there are several.
        epsilon: Added to the mean square.
        dtype: The dtype of the output; ``None``: inferred from inputs and Params.
        param_dtype: The dtype in which the scale is stored.
        use_scale: Whether there is a scale.
        scale_init: Initializer of ``scale``.
        reduction_axes: The axes to compute the mean square over.
        feature_axes: The axes along which the scale varies.
        axis_name: A mapped axis to also average the mean square over.
        axis_index_groups: Groups of indices of that axis to average in.
        use_fast_variance: No effect; accepted for symmetry with `LayerNorm`.
        promote_dtype: Called as ``promote_dtype((x, scale), dtype=dtype)``.
        rngs: Gives one key to ``scale``.
        scale_metadata: Metadata of the Param ``scale``.

    Attributes:
        scale: Param, ``[num_features]``, or ``None``.

    Raises:
        AttributeError: If a scale is wanted and ``rngs`` has no stream ``params``.

    Example:
        >>> layer = nnx.RMSNorm(2, rngs=nnx.Rngs(0))
        >>> y = layer(jnp.array([[3.0, 4.0]]))
        >>> jnp.mean(y**2).round(3)
        Array(1., dtype=float32)

    References:
        Zhang and Sennrich, 2019, "Root Mean Square Layer Normalization", eq. 4.
    """

    num_features: int
    _is_centered: ClassVar[bool] = False

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_scale: bool = True,
        scale_init: Initializer = initializers.ones,
        reduction_axes: Axes = -1,
        feature_axes: Axes = -1,
        axis_name: Any = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = arguments.promote_dtype,
        rngs: Rngs,
        scale_metadata: Mapping[str, Any] = arguments.NO_METADATA,
    ):
        _set_up(self, locals())

    def __call__(
        self,
        x: Num[ArrayLike, "*shape"],
        mask: Bool[ArrayLike, "*mask_shape"] | None = None,
    ) -> Inexact[Array, "*shape"]:
        """Normalizes ``x``.

        Args:
            x: Inputs of any shape that fits ``feature_axes``.
            mask: Booleans, broadcastable to ``x``: the positions that count in the mean
                square.

        Returns:
            A new array of the shape of ``x``.

        Raises:
            TypeError: If ``x`` has the wrong number of features or is not numeric.
            ValueError: If an axis does not exist, if ``mask`` is not boolean or can't
                be broadcast to ``x``, or if ``dtype`` is neither floating nor complex.
        """
        return self._applied(x, mask)


class InstanceNorm(_SampleNorm):
    """Normalizes each feature of each sample over its positions.

    Arguments not listed here are those of `LayerNorm`.

    Args:
        feature_axes: The axes along which scale and bias vary. Statistics are computed
            over all axes but these and the first.

    Attributes:
        scale: Param, ``[num_features]``, or ``None``.
        bias: Param, ``[num_features]``, or ``None``.

    Raises:
        AttributeError: If a Param is wanted and ``rngs`` has no stream ``params``.

    Example:
        >>> layer = nnx.InstanceNorm(1, rngs=nnx.Rngs(0))
        >>> layer(jnp.array([[[0.0], [2.0], [4.0]]])).round(2).ravel()
        Array([-1.22,  0.  ,  1.22], dtype=float32)

    References:
        Ulyanov, Vedaldi and Lempitsky, 2016, "Instance Normalization", eq. 4.
    """

    num_features: int

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = initializers.zeros,
        scale_init: Initializer = initializers.ones,
        feature_axes: Axes = -1,
        axis_name: Any = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = arguments.promote_dtype,
        rngs: Rngs,
        bias_metadata: Mapping[str, Any] = arguments.NO_METADATA,
        scale_metadata: Mapping[str, Any] = arguments.NO_METADATA,
    ):
        _set_up(self, locals())

    def _axes(self, ndim: int) -> _Axes:
        feature_axes = arguments.canonical_axes(self.feature_axes, ndim)
        if 0 in feature_axes:
            raise ValueError(
                "The channel axes cannot include the leading dimension as this is "
                f"assumed to be the batch axis, but feature_axes={self.feature_axes}."
            )
        axes = tuple([axis for axis in range(1, ndim) if axis not in feature_axes])
        return _Axes(axes, feature_axes)


class GroupNorm(_SampleNorm):
    """Normalizes each group of features of each sample, over its positions.

    The last axis is split into ``num_groups`` times ``group_size`` features. With one
    group this is a `LayerNorm` over all axes but the first, with groups of one feature
    an `InstanceNorm`.

    Arguments not listed here are those of `LayerNorm`.

    Args:
        num_features: Size of the last axis of the inputs.
        num_groups: Number of groups; give ``None`` with ``group_size``.
        group_size: Number of features per group; ``None``: follows from ``num_groups``.
        reduction_axes: The axes to compute the statistics over; they must include the
            last, of which each group covers its own part. ``None``: all but the first.

    Attributes:
        scale: Param, ``[num_features]``, or ``None``.
        bias: Param, ``[num_features]``, or ``None``.

    Raises:
        ValueError: If both or neither of ``num_groups`` and ``group_size`` are given,
            or if the features cannot be split that way.
        AttributeError: If a Param is wanted and ``rngs`` has no stream ``params``.

    Example:
        >>> layer = nnx.GroupNorm(4, num_groups=2, rngs=nnx.Rngs(0))
        >>> layer(jnp.array([[1.0, 3.0, 10.0, 50.0]])).round(2)
        Array([[-1.,  1., -1.,  1.]], dtype=float32)

    References:
        Wu and He, 2018, "Group Normalization", eq. 7.
    """

    reduction_axes: Axes | None

    def __init__(
        self,
        num_features: int,
        num_groups: int | None = 32,
        group_size: int | None = None,
        *,
        epsilon: float = 1e-6,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = initializers.zeros,
        scale_init: Initializer = initializers.ones,
        reduction_axes: Axes | None = None,
        axis_name: Any = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = arguments.promote_dtype,
        rngs: Rngs,
        bias_metadata: Mapping[str, Any] = arguments.NO_METADATA,
        scale_metadata: Mapping[str, Any] = arguments.NO_METADATA,
    ):
        arguments.check_sizes(self, num_features=num_features)
        num_groups, group_size = _split_features(num_features, num_groups, group_size)
        self.feature_axis = -1
        self.num_groups, self.group_size = num_groups, group_size
        _set_up(self, locals())

    @property
    def num_features(self) -> int:
        """The size of the last axis of the inputs."""
        return self.num_groups * self.group_size

    def _axes(self, ndim: int) -> _Axes:
        last = ndim - 1
        axes = (*range(1, last), last)
        if self.reduction_axes is not None:
            axes = arguments.canonical_axes(self.reduction_axes, ndim)
        if last not in axes:
            raise ValueError(
                f"reduction_axes={self.reduction_axes} must include the last axis."
            )
        # The last axis becomes two: the group, and the place in the group.
        groups = (self.num_groups, self.group_size)
        return _Axes((*axes[:-1], last + 1), (last, last + 1), groups)


def _split_features(
    num_features: int, num_groups: int | None, group_size: int | None
) -> tuple[int, int]:
    """Checks the arguments, and returns number and size of the groups."""
    if (num_groups is None) == (group_size is None):
        raise ValueError(
            "Either `num_groups` or `group_size` should be specified, not both, got "
            f"num_groups={num_groups} and group_size={group_size}.\n"
            "Pass `num_groups=None` with `group_size`, to override the default of "
            "`num_groups`, which is 32."
        )
    if group_size is not None:
        if group_size <= 0 or num_features % group_size:
            raise ValueError(
                f"Number of features ({num_features}) is not multiple of the group "
                f"size ({group_size})."
            )
        return num_features // group_size, group_size
    if not arguments.is_int(num_groups) or num_groups <= 0 or num_features % num_groups:
        raise ValueError(
            f"Number of groups ({num_groups}) does not divide the number of channels "
            f"({num_features})."
        )
    return num_groups, num_features // num_groups
