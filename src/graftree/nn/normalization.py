"""Normalization layers, which differ in the axes that they average over.

``BatchNorm`` averages over all axes but the features, and remembers the averages;
``LayerNorm`` and ``RMSNorm`` over the features of each sample, ``InstanceNorm`` over
its positions, ``GroupNorm`` over its positions and a group of features; the arithmetic
is in ``moments``. State is written last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

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
from graftree.core.objects import attributes
from graftree.core.rng.streams import Rngs
from graftree.core.variables import sharding
from graftree.core.variables.kinds import BatchStat
from graftree.nn import initializers, moments
from graftree.nn.support import arguments, arithmetic, eager


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
        self.scale = attributes.data(None)
        if use_scale:
            self.scale = arguments.make_param(
                scale_init, rngs, (num_features,), param_dtype, scale_metadata
            )
        self.bias = attributes.data(None)
        if use_bias:
            self.bias = arguments.make_param(
                bias_init, rngs, (num_features,), param_dtype, bias_metadata
            )
        self.num_features = num_features
        self.use_running_average = use_running_average
        self.axis = axis
        self.momentum = momentum
        self.epsilon = epsilon
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.use_bias = use_bias
        self.use_scale = use_scale
        self.axis_name = axis_name
        self.axis_index_groups = axis_index_groups
        self.use_fast_variance = use_fast_variance
        self.promote_dtype = promote_dtype

    @eager.compiled
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
                statistics, all the same, even along ``axis_name``. A feature without
                such positions is normalized with its running statistics, which do not
                change.

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
        mask = None if use_running_average else moments.prepare_mask(mask, inputs)
        feature_axes = arguments.canonical_axes(self.axis, inputs.ndim)
        axes = tuple([axis for axis in range(inputs.ndim) if axis not in feature_axes])
        inputs, mean, variance, scale, bias = moments.promoted(
            self,
            feature_axes,
            inputs,
            self.mean[...],
            self.var[...],
            arguments.read(self.scale),
            arguments.read(self.bias),
        )
        dtype = arguments.canonicalize_dtype(inputs, scale, bias, dtype=self.dtype)
        is_known = None
        if use_running_average or mask is not None:
            mean, variance = moments.along(feature_axes, inputs.shape, mean, variance)
        if mask is not None:
            mask, is_known = moments.split_mask(self, mask, axes)
        if not use_running_average:
            current = moments.moments(self, inputs, axes, mask)
            mean, variance = moments.where_known(is_known, current, (mean, variance))
        scale, bias = moments.along(feature_axes, inputs.shape, scale, bias)
        factor = arithmetic.times(lax.rsqrt(variance + self.epsilon), scale)
        y = arithmetic.times(arithmetic.minus(inputs, mean), factor)
        y = arithmetic.plus(y, bias)
        if not use_running_average:
            self._move_towards(mean, variance, is_known)
        return jnp.asarray(y, dtype)

    def _move_towards(
        self, mean: jax.Array, variance: jax.Array, is_known: jax.Array | None
    ) -> None:
        """Moves the running statistics towards these, where these are known."""
        running = self.mean[...], self.var[...]
        moved = [
            moments.moved(old, current, is_known, self.momentum)
            for old, current in zip(running, (mean, variance), strict=True)
        ]
        self.mean[...], self.var[...] = map(sharding.kept, moved, running)

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Sets how the view's layer works.

        Args:
            use_running_average: Whether to use the running statistics instead of those
                of the inputs, and to leave them unchanged.
        """
        if use_running_average is not None:
            self.use_running_average = use_running_average


class _SampleNorm(moments.Norm):
    """Normalizes with the statistics of each sample; subclasses choose their axes."""

    reduction_axes: Any
    feature_axes: Axes

    @eager.compiled
    def __call__(
        self,
        x: Num[ArrayLike, "*shape"],
        *,
        mask: Bool[ArrayLike, "*mask_shape"] | None = None,
    ) -> Inexact[Array, "*shape"]:
        """Normalizes ``x``.

        Args:
            x: Inputs of any shape that fits the axes of the layer; for `InstanceNorm`
                with the samples along the first axis.
            mask: Booleans, broadcastable to ``x``: the positions that count in the
                statistics, all the same, even along ``axis_name``.

        Returns:
            A new array of the shape of ``x``.

        Raises:
            TypeError: If ``x`` has the wrong number of features or is not numeric.
            ValueError: If an axis does not exist, if the ``feature_axes`` of an
                `InstanceNorm` include the first axis, if ``mask`` is not boolean or
                can't be broadcast to ``x``, or if ``dtype`` is neither floating nor
                complex.
        """
        inputs = arguments.as_array(x)
        mask = moments.prepare_mask(mask, inputs)
        axes, feature_axes = self._axes(inputs.ndim)
        scale, bias = arguments.read(self.scale), arguments.read(self.bias)
        inputs, scale, bias = moments.promoted(self, feature_axes, inputs, scale, bias)
        dtype = arguments.canonicalize_dtype(inputs, scale, bias, dtype=self.dtype)
        mean, variance = moments.moments(self, inputs, axes, mask)
        scale = moments.with_offset(self, scale, variance.dtype)
        scale, bias = moments.along(feature_axes, inputs.shape, scale, bias)
        factor = arithmetic.times(lax.rsqrt(variance + self.epsilon), scale)
        y = arithmetic.times(arithmetic.minus(inputs, mean), factor)
        y = arithmetic.plus(y, bias)
        return jnp.asarray(y, dtype)

    def _axes(self, ndim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Lists the axes of statistics and of features, of inputs with this rank."""
        return (
            arguments.canonical_axes(self.reduction_axes, ndim),
            arguments.canonical_axes(self.feature_axes, ndim),
        )


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
        scale_offset: Added to ``scale``, as in `RMSNorm`.

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
        scale_offset: float = 0.0,
    ):
        arguments.check_sizes(self, num_features=num_features)
        scale_init = moments.scale_init(scale_init, scale_offset)
        self.scale = attributes.data(None)
        if use_scale:
            self.scale = arguments.make_param(
                scale_init, rngs, (num_features,), param_dtype, scale_metadata
            )
        self.bias = attributes.data(None)
        if use_bias:
            self.bias = arguments.make_param(
                bias_init, rngs, (num_features,), param_dtype, bias_metadata
            )
        self.num_features = num_features
        self.epsilon = epsilon
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.use_bias = use_bias
        self.use_scale = use_scale
        self.reduction_axes = reduction_axes
        self.feature_axes = feature_axes
        self.axis_name = axis_name
        self.axis_index_groups = axis_index_groups
        self.use_fast_variance = use_fast_variance
        self.promote_dtype = promote_dtype
        self.scale_offset = scale_offset


class RMSNorm(_SampleNorm):
    """Scales each sample to a mean square of one over its features.

    Computes ``x * (rsqrt(mean(|x|^2) + epsilon) * (scale_offset + scale))``, without a
    mean and a bias. Arguments not listed here are those of `LayerNorm`.

    Args:
        epsilon: Added to the mean square.
        scale_init: Initializer of ``scale``; the default, ones, is that of the factor,
            so ``scale`` starts as ``1 - scale_offset``.
        use_fast_variance: No effect; accepted for symmetry with `LayerNorm`.
        promote_dtype: Called as ``promote_dtype((x, scale), dtype=dtype)``.
        rngs: Gives one key to ``scale``.
        scale_offset: 1.0 for weights stored as ``w`` and applied as ``1 + w``, as those
            of Gemma and Nemotron. The sum is computed in float32 or wider.

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
        scale_offset: float = 0.0,
    ):
        arguments.check_sizes(self, num_features=num_features)
        scale_init = moments.scale_init(scale_init, scale_offset)
        self.scale = attributes.data(None)
        if use_scale:
            self.scale = arguments.make_param(
                scale_init, rngs, (num_features,), param_dtype, scale_metadata
            )
        self.num_features = num_features
        self.epsilon = epsilon
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.use_scale = use_scale
        self.reduction_axes = reduction_axes
        self.feature_axes = feature_axes
        self.axis_name = axis_name
        self.axis_index_groups = axis_index_groups
        self.use_fast_variance = use_fast_variance
        self.promote_dtype = promote_dtype
        self.scale_offset = scale_offset

    @eager.compiled
    def __call__(
        self,
        x: Num[ArrayLike, "*shape"],
        mask: Bool[ArrayLike, "*mask_shape"] | None = None,
    ) -> Inexact[Array, "*shape"]:
        """Normalizes ``x``.

        Args:
            x: Inputs of any shape that fits ``feature_axes``.
            mask: Booleans, broadcastable to ``x``: the positions that count.

        Raises:
            TypeError: See `LayerNorm`.
            ValueError: See `LayerNorm`.
        """
        inputs = arguments.as_array(x)
        mask = moments.prepare_mask(mask, inputs)
        axes, feature_axes = self._axes(inputs.ndim)
        scale = arguments.read(self.scale)
        inputs, scale = moments.promoted(self, feature_axes, inputs, scale)
        dtype = arguments.canonicalize_dtype(inputs, scale, dtype=self.dtype)
        square = moments.mean_square(self, inputs, axes, mask)
        scale = moments.with_offset(self, scale, square.dtype)
        (scale,) = moments.along(feature_axes, inputs.shape, scale)
        factor = arithmetic.times(lax.rsqrt(square + self.epsilon), scale)
        return jnp.asarray(arithmetic.times(inputs, factor), dtype)


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
        arguments.check_sizes(self, num_features=num_features)
        self.scale = attributes.data(None)
        if use_scale:
            self.scale = arguments.make_param(
                scale_init, rngs, (num_features,), param_dtype, scale_metadata
            )
        self.bias = attributes.data(None)
        if use_bias:
            self.bias = arguments.make_param(
                bias_init, rngs, (num_features,), param_dtype, bias_metadata
            )
        self.num_features = num_features
        self.epsilon = epsilon
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.use_bias = use_bias
        self.use_scale = use_scale
        self.feature_axes = feature_axes
        self.axis_name = axis_name
        self.axis_index_groups = axis_index_groups
        self.use_fast_variance = use_fast_variance
        self.promote_dtype = promote_dtype

    def _axes(self, ndim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        feature_axes = arguments.canonical_axes(self.feature_axes, ndim)
        if 0 in feature_axes:
            raise ValueError(
                "The channel axes cannot include the leading dimension as this is "
                f"assumed to be the batch axis, but feature_axes={self.feature_axes}."
            )
        axes = tuple([axis for axis in range(1, ndim) if axis not in feature_axes])
        return axes, feature_axes


class GroupNorm(moments.Norm):
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
        num_groups, group_size = arguments.split_features(
            num_features, num_groups, group_size
        )
        self.feature_axis = -1
        self.num_groups, self.group_size = num_groups, group_size
        self.scale = attributes.data(None)
        if use_scale:
            self.scale = arguments.make_param(
                scale_init, rngs, (num_features,), param_dtype, scale_metadata
            )
        self.bias = attributes.data(None)
        if use_bias:
            self.bias = arguments.make_param(
                bias_init, rngs, (num_features,), param_dtype, bias_metadata
            )
        self.epsilon = epsilon
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.use_bias = use_bias
        self.use_scale = use_scale
        self.reduction_axes = reduction_axes
        self.axis_name = axis_name
        self.axis_index_groups = axis_index_groups
        self.use_fast_variance = use_fast_variance
        self.promote_dtype = promote_dtype

    @property
    def num_features(self) -> int:
        """The size of the last axis of the inputs."""
        return self.num_groups * self.group_size

    @eager.compiled
    def __call__(
        self,
        x: Num[ArrayLike, "*shape"],
        *,
        mask: Bool[ArrayLike, "*mask_shape"] | None = None,
    ) -> Inexact[Array, "*shape"]:
        """Normalizes ``x``.

        Args:
            x: ``[batch, *positions, num_features]``, or ``[num_features]``.
            mask: See `LayerNorm`.

        Raises:
            TypeError: See `LayerNorm`.
            ValueError: See `LayerNorm`; if the ``reduction_axes`` lack the last axis.
        """
        inputs = arguments.as_array(x)
        mask = moments.prepare_mask(mask, inputs)
        axes = self._axes(inputs.ndim)
        scale, bias = arguments.read(self.scale), arguments.read(self.bias)
        inputs, scale, bias = moments.promoted(self, (-1,), inputs, scale, bias)
        dtype = arguments.canonicalize_dtype(inputs, scale, bias, dtype=self.dtype)
        # Empty arrays would fit into any groups.
        num_features = inputs.shape[-1:]
        if num_features != (self.num_features,):
            raise TypeError(
                f"GroupNorm expects {self.num_features} features, got {num_features}."
            )
        groups = (self.num_groups, self.group_size)
        grouped = jnp.reshape(inputs, (*inputs.shape[:-1], *groups))
        if mask is not None:
            mask = jnp.broadcast_to(mask, (*mask.shape[:-1], inputs.shape[-1]))
            mask = jnp.reshape(mask, (*mask.shape[:-1], *groups))
        mean, variance = moments.moments(self, grouped, axes, mask)
        last_two = (inputs.ndim - 1, inputs.ndim)
        scale, bias = moments.along(last_two, grouped.shape, scale, bias)
        factor = arithmetic.times(lax.rsqrt(variance + self.epsilon), scale)
        y = arithmetic.times(arithmetic.minus(grouped, mean), factor)
        y = arithmetic.plus(y, bias)
        return jnp.reshape(jnp.asarray(y, dtype), inputs.shape)

    def _axes(self, ndim: int) -> tuple[int, ...]:
        """Lists the axes of statistics, in inputs whose last axis is split in two."""
        last = ndim - 1
        axes = (*range(1, last), last)
        if self.reduction_axes is not None:
            axes = arguments.canonical_axes(self.reduction_axes, ndim)
        if last not in axes:
            raise ValueError(
                f"reduction_axes={self.reduction_axes} must include the last axis."
            )
        return (*axes[:-1], ndim)  # in each group: that of its features
