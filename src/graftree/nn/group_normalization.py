"""Normalization over the positions of each sample, for images and sequences.

``InstanceNorm`` averages over the positions, for each feature by itself; ``GroupNorm``
over the positions and a group of features. The arithmetic is in ``moments``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from graftree import errors
from graftree.annotations import Axes, Dtype, Initializer, PromoteDtypeFn
from graftree.core.modules.modules import Module
from graftree.core.rng.streams import Rngs
from graftree.nn import initializers, moments
from graftree.nn.support import arguments, checks, parameters, promotion

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Inexact, Num


class InstanceNorm(Module):
    """Normalizes each feature of each sample over its positions.

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
        feature_axes: The axes along which scale and bias vary. Statistics are computed
            over all axes but these and the first.
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
        >>> layer = nnx.InstanceNorm(1, rngs=nnx.Rngs(0))
        >>> layer(jnp.array([[[0.0], [2.0], [4.0]]])).round(2).ravel()
        Array([-1.22,  0.  ,  1.22], dtype=float32)

    References:
        Ulyanov, Vedaldi and Lempitsky, 2016, "Instance Normalization", eq. 4.
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
        self.feature_axes = feature_axes
        self.axis_name = axis_name
        self.axis_index_groups = axis_index_groups
        self.use_fast_variance = use_fast_variance
        self.promote_dtype = promote_dtype

    def __call__(
        self,
        x: Num[Array, "batch *shape"],
        *,
        mask: Bool[Array, "*mask_shape"] | None = None,
    ) -> Inexact[Array, "batch *shape"]:
        """Normalizes ``x``.

        Args:
            x: Inputs, samples along the first axis.
            mask: Booleans, broadcastable to ``x``: the positions that count in the
                statistics.

        Returns:
            A new array of the shape of ``x``.

        Raises:
            TypeError: If ``x`` has another number of features, or if it holds no
                numbers.
            ValueError: If ``feature_axes`` include the first axis, if an axis does not
                exist, if ``mask`` is not boolean or can't be broadcast to ``x``, or if
                ``dtype`` is neither floating nor complex.
        """
        x = checks.as_array(self, x)
        feature_axes = checks.axes(self, "feature_axes", x)
        if 0 in feature_axes:
            raise ValueError(
                "The channel axes cannot include the leading dimension as this is "
                f"assumed to be the batch axis, but {checks.name(self)} has "
                f"feature_axes={self.feature_axes} and inputs {checks.describe(x)}."
            )
        mask = moments.prepare_mask(self, mask, x)
        x, scale, bias = moments.promote(self, x, feature_axes)
        axes = tuple(axis for axis in range(1, x.ndim) if axis not in feature_axes)
        mean, variance = moments.moments(self, x, axes, mask)
        return moments.normalize(self, x, mean, variance, scale, bias, feature_axes)


class GroupNorm(Module):
    """Normalizes each group of features of each sample, over its positions.

    The last axis is split into ``num_groups`` times ``group_size`` features. One group
    makes a `LayerNorm` over all axes but the first, groups of one an `InstanceNorm`.

    Args:
        num_features: Size of the last axis of the inputs.
        num_groups: Number of groups; give ``None`` with ``group_size``.
        group_size: Number of features per group; ``None``: follows from ``num_groups``.
        epsilon: Added to the variance.
        dtype: The dtype of the output; ``None``: inferred from inputs and Params.
        param_dtype: The dtype in which the Params are stored.
        use_bias: Whether there is a bias.
        use_scale: Whether there is a scale.
        bias_init: Initializer of ``bias``.
        scale_init: Initializer of ``scale``.
        reduction_axes: The axes to compute the statistics over, the last one among
            them, for which only a group's part is meant; ``None``: all but the first.
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
        promote_dtype: PromoteDtypeFn = promotion.promote_dtype,
        rngs: Rngs,
        bias_metadata: Mapping[str, Any] = parameters.NO_METADATA,
        scale_metadata: Mapping[str, Any] = parameters.NO_METADATA,
    ):
        self.feature_axis = -1
        self.num_groups, self.group_size = _split_features(
            num_features, num_groups, group_size
        )
        shape = (num_features,)
        self.scale = parameters.optional_param(
            use_scale, rngs, scale_init, shape, param_dtype, scale_metadata
        )
        self.bias = parameters.optional_param(
            use_bias, rngs, bias_init, shape, param_dtype, bias_metadata
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

    def __call__(
        self,
        x: Num[Array, "*shape features"],
        *,
        mask: Bool[Array, "*mask_shape"] | None = None,
    ) -> Inexact[Array, "*shape features"]:
        """Normalizes ``x``.

        Args:
            x: Inputs, ``[batch, *positions, num_features]``, or ``[num_features]``.
            mask: Booleans, broadcastable to ``x``: the positions that count in the
                statistics.

        Returns:
            A new array of the shape of ``x``.

        Raises:
            TypeError: If ``x`` has another number of features, or if it holds no
                numbers.
            ValueError: If ``reduction_axes`` lack the last axis or name one that does
                not exist, if ``mask`` is not boolean or can't be broadcast to ``x``, or
                if ``dtype`` is neither floating nor complex.
        """
        x = checks.as_array(self, x)
        self._check_features(x)
        last = x.ndim - 1
        # The statistics live where the last axis is two: group, and place in the group.
        axes = tuple(range(1, last)) + (last,)
        if self.reduction_axes is not None:
            axes = checks.axes(self, "reduction_axes", x)
        if last not in axes:
            raise ValueError(
                f"The reduction axes of {checks.name(self)} must include the last "
                f"axis, {last}, but reduction_axes={self.reduction_axes}."
            )
        axes = axes[:-1] + (last + 1,)
        mask = moments.prepare_mask(self, mask, x)
        if mask is not None:
            mask = self._group(jnp.broadcast_to(mask, (*mask.shape[:-1], x.shape[-1])))
        x, scale, bias = moments.promote(self, x, (last,))
        grouped = self._group(x)
        mean, variance = moments.moments(self, grouped, axes, mask)
        y = moments.normalize(
            self, grouped, mean, variance, scale, bias, (last, last + 1)
        )
        return y.reshape(x.shape)

    def _check_features(self, x: jax.Array) -> None:
        """Raises unless the groups make up the last axis, also without Params."""
        if x.shape[-1:] != (self.num_features,):
            raise TypeError(
                errors.message(
                    f"{checks.name(self)} needs inputs with {self.num_features} "
                    f"features along the last axis, {self.num_groups} groups of "
                    f"{self.group_size}.",
                    where=f"inputs: {checks.describe(x)}",
                )
            )

    def _group(self, x: jax.Array) -> jax.Array:
        """Splits the last axis in two."""
        return jnp.reshape(x, (*x.shape[:-1], self.num_groups, self.group_size))


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
    is_count = arguments.is_int(num_groups) and num_groups > 0
    if not is_count or num_features % num_groups:
        raise ValueError(
            f"Number of groups ({num_groups}) does not divide the number of channels "
            f"({num_features})."
        )
    return num_groups, num_features // num_groups
