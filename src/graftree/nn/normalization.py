"""Normalization over the batch, with memory, and over the features.

``BatchNorm`` averages over all axes but the features, and remembers the averages;
``LayerNorm`` and ``RMSNorm`` average over the features of each sample. The arithmetic
is in ``moments``. State is written last: a failed call changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from graftree.annotations import Axes, Dtype, Initializer, PromoteDtypeFn
from graftree.core.modules.modules import Module
from graftree.core.rng.streams import Rngs
from graftree.core.variables.kinds import BatchStat
from graftree.nn import initializers, moments
from graftree.nn.support import checks, parameters, promotion

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Inexact, Num


class BatchNorm(Module):
    """Normalizes each feature over the batch, and remembers the statistics.

    While training (``use_running_average=False``) a call uses mean and variance of its
    inputs, over all axes but ``axis``, and moves the running statistics towards them:
    ``running = momentum * running + (1 - momentum) * current``. Otherwise it uses the
    running statistics and changes nothing.

    Args:
        num_features: Size of the inputs along ``axis``.
        use_running_average: Whether to use the running statistics; ``None``: each call
            says so.
        axis: The feature axis, or axes.
        momentum: How much of the running statistics a training call keeps.
        epsilon: Added to the variance.
        dtype: The dtype of the output; ``None``: inferred from inputs and Params.
        param_dtype: The dtype in which the Params are stored.
        use_bias: Whether there is a bias.
        use_scale: Whether there is a scale.
        bias_init: Initializer of ``bias``.
        scale_init: Initializer of ``scale``.
        axis_name: A mapped axis (of ``vmap``, ``pmap``, ``shard_map``) to average the
            statistics over, too.
        axis_index_groups: Groups of indices of that axis to average in.
        use_fast_variance: Whether to compute the variance as ``mean(x^2) - mean(x)^2``.
        promote_dtype: Called as ``promote_dtype((x, mean, var, scale, bias),
            dtype=dtype)``.
        rngs: Gives one key to ``scale``, then one to ``bias``.
        bias_metadata: Metadata of the Param ``bias``.
        scale_metadata: Metadata of the Param ``scale``.

    Attributes:
        mean: BatchStat, ``[num_features]``, float32: the running mean, at first zeros.
        var: BatchStat, ``[num_features]``, float32: the running population variance, at
            first ones.
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
        promote_dtype: PromoteDtypeFn = promotion.promote_dtype,
        rngs: Rngs,
        bias_metadata: Mapping[str, Any] = parameters.NO_METADATA,
        scale_metadata: Mapping[str, Any] = parameters.NO_METADATA,
    ):
        self.mean = BatchStat(jnp.zeros((num_features,), jnp.float32))
        self.var = BatchStat(jnp.ones((num_features,), jnp.float32))
        shape = (num_features,)
        self.scale = parameters.optional_param(
            use_scale, rngs, scale_init, shape, param_dtype, scale_metadata
        )
        self.bias = parameters.optional_param(
            use_bias, rngs, bias_init, shape, param_dtype, bias_metadata
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

    def __call__(
        self,
        x: Num[Array, "*shape"],
        use_running_average: bool | None = None,
        *,
        mask: Bool[Array, "*mask_shape"] | None = None,
    ) -> Inexact[Array, "*shape"]:
        """Normalizes ``x``; while training, updates the running statistics.

        Args:
            x: Inputs, with ``num_features`` entries along ``axis``. The running mean of
                complex ones keeps its real part only.
            use_running_average: Overrides the attribute, if not ``None``.
            mask: Booleans, broadcastable to ``x``: the positions that count in the
                statistics. A feature none of whose positions count is normalized with
                its running statistics, and these stay as they are.

        Returns:
            A new array of the shape of ``x``.

        Raises:
            ValueError: If neither the call nor the attribute says whether to use the
                running statistics, if ``axis`` does not exist, if ``mask`` is not
                boolean or can't be broadcast to ``x``, or if ``dtype`` is neither
                floating nor complex. The statistics are then as before the call.
            TypeError: If ``x`` has another number of features, or if it holds no
                numbers. Here, too, the statistics stay.
        """
        use_running_average = checks.setting(
            self, "use_running_average", use_running_average
        )
        x = checks.as_array(self, x)
        feature_axes = checks.axes(self, "axis", x)
        if not use_running_average:
            mask = moments.prepare_mask(self, mask, x)
        x, mean, variance, scale, bias = moments.promote(
            self, x, feature_axes, self.mean[...], self.var[...]
        )

        def at_features(statistic: jax.Array) -> jax.Array:
            shape = parameters.shape_along(feature_axes, x.shape)
            return jnp.reshape(statistic, shape)

        if use_running_average:
            mean, variance = at_features(mean), at_features(variance)
            return moments.normalize(self, x, mean, variance, scale, bias, feature_axes)
        axes = tuple(axis for axis in range(x.ndim) if axis not in feature_axes)
        is_known = None
        if mask is None:
            mean, variance = moments.moments(self, x, axes)
        else:
            mask, is_known = self._split_mask(mask, axes)
            running = at_features(mean), at_features(variance)
            mean, variance = (
                jnp.where(is_known, current, old)
                for current, old in zip(
                    moments.moments(self, x, axes, mask), running, strict=True
                )
            )
        y = moments.normalize(self, x, mean, variance, scale, bias, feature_axes)
        self._move_statistics(mean, variance, is_known)
        return y

    def _split_mask(
        self, mask: jax.Array, axes: tuple[int, ...]
    ) -> tuple[jax.Array, jax.Array]:
        """Parts a mask into one without empty features, and which these are.

        An empty mean is 0 / 0, with a NaN gradient even where it is not selected. So
        where nothing counts, let everything count, and say that the result is void.

        Returns:
            The mask to compute statistics with; and, with size one along ``axes``, the
            features that have statistics, on all devices that are averaged over.
        """
        is_known = jnp.any(mask, axes, keepdims=True)
        mask = mask | ~is_known
        share_known = moments.average_over(self, is_known.astype(jnp.float32))
        return mask, share_known == 1.0

    def _move_statistics(
        self, mean: jax.Array, variance: jax.Array, is_known: jax.Array | None
    ) -> None:
        """Moves the running statistics of the known features towards the given ones."""
        moved = [
            self._moved(statistic[...], current, is_known)
            for statistic, current in ((self.mean, mean), (self.var, variance))
        ]
        self.mean[...], self.var[...] = moved

    def _moved(
        self, old: jax.Array, current: jax.Array, is_known: jax.Array | None
    ) -> jax.Array:
        """A running statistic, moved towards the present one where that is known."""
        new = self.momentum * old
        new += (1 - self.momentum) * current.reshape(old.shape)
        if is_known is not None:
            is_known = jnp.broadcast_to(is_known, current.shape).reshape(old.shape)
            new = jnp.where(is_known, new, old)
        if jnp.iscomplexobj(new) and not jnp.iscomplexobj(old):
            new = jnp.real(new)
        # Stored gradients would leak out of transforms through array refs.
        return jax.lax.stop_gradient(new).astype(old.dtype)

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Sets how the layer of a view works.

        Args:
            use_running_average: Whether to use the running statistics instead of those
                of the inputs, and to leave them as they are.
        """
        if use_running_average is not None:
            self.use_running_average = use_running_average


class LayerNorm(Module):
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
        axis_name: A mapped axis to average the statistics over, too.
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
        promote_dtype: PromoteDtypeFn = promotion.promote_dtype,
        rngs: Rngs,
        bias_metadata: Mapping[str, Any] = parameters.NO_METADATA,
        scale_metadata: Mapping[str, Any] = parameters.NO_METADATA,
    ):
        shape = (num_features,)
        self.scale = parameters.optional_param(
            use_scale, rngs, scale_init, shape, param_dtype, scale_metadata
        )
        self.bias = parameters.optional_param(
            use_bias, rngs, bias_init, shape, param_dtype, bias_metadata
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

    def __call__(
        self,
        x: Num[Array, "*shape"],
        *,
        mask: Bool[Array, "*mask_shape"] | None = None,
    ) -> Inexact[Array, "*shape"]:
        """Normalizes ``x``.

        Args:
            x: Inputs of any shape that fits ``feature_axes``.
            mask: Booleans, broadcastable to ``x``: the positions that count in the
                statistics.

        Returns:
            A new array of the shape of ``x``.

        Raises:
            TypeError: If ``x`` has another number of features, or if it holds no
                numbers.
            ValueError: If an axis does not exist, if ``mask`` is not boolean or can't
                be broadcast to ``x``, or if ``dtype`` is neither floating nor complex.
        """
        x = checks.as_array(self, x)
        axes = checks.axes(self, "reduction_axes", x)
        feature_axes = checks.axes(self, "feature_axes", x)
        mask = moments.prepare_mask(self, mask, x)
        x, scale, bias = moments.promote(self, x, feature_axes)
        mean, variance = moments.moments(self, x, axes, mask)
        return moments.normalize(self, x, mean, variance, scale, bias, feature_axes)


class RMSNorm(Module):
    """Brings each sample to a mean square of one over its features.

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
        axis_name: A mapped axis to average the mean square over, too.
        axis_index_groups: Groups of indices of that axis to average in.
        use_fast_variance: Without effect; here for symmetry with `LayerNorm`.
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
        promote_dtype: PromoteDtypeFn = promotion.promote_dtype,
        rngs: Rngs,
        scale_metadata: Mapping[str, Any] = parameters.NO_METADATA,
    ):
        self.scale = parameters.optional_param(
            use_scale, rngs, scale_init, (num_features,), param_dtype, scale_metadata
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

    def __call__(
        self,
        x: Num[Array, "*shape"],
        mask: Bool[Array, "*mask_shape"] | None = None,
    ) -> Inexact[Array, "*shape"]:
        """Normalizes ``x``.

        Args:
            x: Inputs of any shape that fits ``feature_axes``.
            mask: Booleans, broadcastable to ``x``: the positions that count in the mean
                square.

        Returns:
            A new array of the shape of ``x``.

        Raises:
            TypeError: If ``x`` has another number of features, or if it holds no
                numbers.
            ValueError: If an axis does not exist, if ``mask`` is not boolean or can't
                be broadcast to ``x``, or if ``dtype`` is neither floating nor complex.
        """
        x = checks.as_array(self, x)
        axes = checks.axes(self, "reduction_axes", x)
        feature_axes = checks.axes(self, "feature_axes", x)
        mask = moments.prepare_mask(self, mask, x)
        scale = parameters.read(self.scale)
        moments.check_features(self, x, feature_axes, scale)
        x, scale = self.promote_dtype((x, scale), dtype=self.dtype)
        mean_square = moments.mean_square(self, x, axes, mask)
        return moments.normalize(self, x, None, mean_square, scale, None, feature_axes)
