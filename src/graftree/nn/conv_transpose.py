"""Transposed convolution: the map from outputs of a convolution back to its inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from graftree.annotations import (
    Dtype,
    Initializer,
    PaddingLike,
    PrecisionLike,
    PromoteDtypeFn,
)
from graftree.core.modules.modules import Module
from graftree.core.rng.streams import Rngs
from graftree.nn import conv, linear
from graftree.nn.support import arguments, checks, parameters, promotion

if TYPE_CHECKING:
    from jaxtyping import Array, Inexact, Num


class ConvTranspose(Module):
    """A transposed convolution with a learned kernel.

    Adds up, for each position of the inputs, a copy of ``kernel`` weighted with the
    input there, copies of neighbours being ``strides`` apart; then adds ``bias``.

    Args:
        in_features: Number of channels of the inputs.
        out_features: Number of channels of the outputs.
        kernel_size: Extent of the kernel per spatial axis; an int means one axis.
        strides: How much longer the outputs are than the inputs: one int for all
            spatial axes, or one each; ``None`` means 1.
        padding: What is cut off, or added, at the ends of the spatial axes:

            - ``"SAME"``: so that the outputs are ``strides`` times as long as the
              inputs
            - ``"VALID"``: nothing is cut off, so all copies are there in full
            - ``"CIRCULAR"``: as long as ``"SAME"``, what sticks out at one end is added
              at the other, as on a torus
            - an int, or a sequence with an int or a ``(low, high)`` pair per spatial
              axis: the padding of the dilated inputs, as in ``jax.lax.conv_transpose``

        kernel_dilation: Step between the outputs that one input reaches.
        use_bias: Whether there is a bias.
        mask: Multiplied with the kernel on each call; of the kernel's shape.
        dtype: The dtype of the computation and the output; ``None``: inferred from
            inputs and Params.
        param_dtype: The dtype in which the Params are stored.
        precision: Passed to the contraction.
        kernel_init: Initializer of ``kernel``.
        bias_init: Initializer of ``bias``.
        transpose_kernel: Whether the kernel is that of the convolution which this layer
            transposes: flipped along its spatial axes, with its channels swapped.
        promote_dtype: Called as ``promote_dtype((inputs, kernel, bias), dtype=dtype)``.
        preferred_element_type: Dtype in which the contraction accumulates and returns
            its result; ``None``: that of its operands.
        rngs: Gives one key to ``kernel``, then one to ``bias``.
        kernel_metadata: Metadata of the Param ``kernel``.
        bias_metadata: Metadata of the Param ``bias``.

    Attributes:
        kernel: Param, ``[*kernel_size, in_features, out_features]``, the last two
            swapped if ``transpose_kernel``.
        bias: Param, ``[out_features]``, or ``None``.

    Raises:
        AttributeError: If ``rngs`` has no stream ``params``.

    Example:
        >>> layer = nnx.ConvTranspose(1, 1, 3, 2, padding="CIRCULAR", rngs=nnx.Rngs(0))
        >>> layer.kernel[...] = jnp.array([1.0, 2.0, 3.0]).reshape(3, 1, 1)
        >>> layer(jnp.array([1.0, 0.0, 0.0, 0.0]).reshape(1, 4, 1)).ravel()
        Array([3., 2., 1., 0., 0., 0., 0., 0.], dtype=float32)

    References:
        Zeiler, Krishnan, Taylor and Fergus, 2010, "Deconvolutional Networks".
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] | None = None,
        *,
        padding: PaddingLike = "SAME",
        kernel_dilation: int | Sequence[int] | None = None,
        use_bias: bool = True,
        mask: Num[Array, "*kernel_shape"] | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = linear.default_kernel_init,
        bias_init: Initializer = linear.default_bias_init,
        transpose_kernel: bool = False,
        promote_dtype: PromoteDtypeFn = promotion.promote_dtype,
        preferred_element_type: Dtype | None = None,
        rngs: Rngs,
        kernel_metadata: Mapping[str, Any] = parameters.NO_METADATA,
        bias_metadata: Mapping[str, Any] = parameters.NO_METADATA,
    ):
        self.kernel_size = arguments.sizes(kernel_size)
        self.in_features = in_features
        self.out_features = out_features
        self.strides = strides
        self.padding = padding
        self.kernel_dilation = kernel_dilation
        self.use_bias = use_bias
        self.mask = mask
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.transpose_kernel = transpose_kernel
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type
        channels = (in_features, out_features)
        self.kernel_shape = self.kernel_size + (
            channels[::-1] if transpose_kernel else channels
        )
        self.kernel = parameters.new_param(
            rngs, kernel_init, self.kernel_shape, param_dtype, kernel_metadata
        )
        self.bias = parameters.optional_param(
            use_bias, rngs, bias_init, (out_features,), param_dtype, bias_metadata
        )

    def __call__(
        self, inputs: Num[Array, "*batch_spatial in_features"]
    ) -> Inexact[Array, "*batch_out_spatial out_features"]:
        """Convolves ``inputs`` with the transpose of the kernel.

        Args:
            inputs: ``[*batch, *spatial, in_features]``, with one spatial axis per entry
                of ``kernel_size`` and any number of batch axes, also none.

        Returns:
            An array ``[*batch, *out_spatial, out_features]``.

        Raises:
            ValueError: If ``inputs`` have too few axes or another number of channels;
                if ``padding`` has none of the known forms; if strides or dilations are
                not one per spatial axis; if the mask has not the kernel's shape; or if
                ``dtype`` is neither floating nor complex.
            TypeError: If ``inputs`` are no numbers.
        """
        given = checks.as_array(self, inputs)
        batch_shape, inputs = conv.flatten_batch(self, given)
        inputs, kernel, bias = self.promote_dtype(
            (inputs, conv.masked_kernel(self), parameters.read(self.bias)),
            dtype=self.dtype,
        )
        channels = kernel.shape[-1 if self.transpose_kernel else -2]
        conv.check_channels(self, given, inputs, kernel, channels)
        rank = len(self.kernel_size)
        strides = conv.per_axis(self, "strides")
        padding = arguments.canonicalize_padding(self.padding, rank)
        is_circular = padding == "CIRCULAR"
        outputs = jax.lax.conv_transpose(
            inputs,
            kernel,
            strides,
            "VALID" if is_circular else padding,
            rhs_dilation=conv.per_axis(self, "kernel_dilation"),
            dimension_numbers=conv.channels_last(rank),
            transpose_kernel=self.transpose_kernel,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
        )
        if is_circular:
            for axis, stride in enumerate(strides, start=1):
                period = inputs.shape[axis] * stride
                outputs = _wrap(outputs, axis, period, self.transpose_kernel)
        outputs = parameters.add_bias(outputs, bias)
        return conv.restore_batch(outputs, batch_shape)


def _wrap(x: jax.Array, axis: int, period: int, is_transposed: bool) -> jax.Array:
    """Adds up, along an axis, all entries that are a multiple of ``period`` apart.

    The axis is padded to an odd number of periods, so that the middle one stays where
    it is; what sticks out by half an entry more goes to the side that the direction of
    the kernel demands.
    """
    missing = -(x.shape[axis] - period) % (2 * period)
    low, high = missing - missing // 2, missing // 2
    if is_transposed:
        low, high = high, low
    pads = [(0, 0)] * x.ndim
    pads[axis] = (low, high)
    x = jnp.pad(x, pads)
    rows = x.shape[axis] // period
    return x.reshape((*x.shape[:axis], rows, period, *x.shape[axis + 1 :])).sum(axis)
