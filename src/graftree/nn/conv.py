"""Convolution over any number of spatial axes, and its transpose.

Arrays are laid out channels last: inputs ``[*batch, *spatial, in_features]``, kernels
``[*kernel_size, in_features / feature_group_count, out_features]``. As everywhere in
deep learning the kernel is not flipped, so this is a cross-correlation.

Padding always applies to the *dilated* input: with ``input_dilation=d`` a layer acts
as on inputs with ``d - 1`` zeros put between neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from graftree import _jax, _python, errors
from graftree.annotations import (
    Array,
    ArrayLike,
    ConvGeneralDilatedT,
    Dtype,
    Inexact,
    Initializer,
    LaxPadding,
    Num,
    PaddingLike,
    PrecisionLike,
    PromoteDtypeFn,
)
from graftree.core.objects import attributes
from graftree.core.rng.streams import Rngs
from graftree.core.text import descriptions
from graftree.nn import linear
from graftree.nn.support import arguments, eager, jax_functions, meshes


class Convolution(linear.Contraction):
    """Base of `Conv` and `ConvTranspose`."""

    kernel_shape: tuple[int, ...]
    in_features: int
    out_features: int
    kernel_size: tuple[int, ...]
    strides: int | Sequence[int] | None
    padding: PaddingLike
    kernel_dilation: int | Sequence[int] | None
    use_bias: bool
    mask: Any


class _OneSize(tuple[int]):
    """A size given as an int, which PyTorch and Keras use for all axes."""

    __slots__ = ()


def _sizes(kernel_size: int | Sequence[int]) -> tuple[int, ...]:
    sizes = arguments.sizes(kernel_size)
    return _OneSize(sizes) if arguments.is_int(kernel_size) else sizes


class Conv(Convolution):
    """A convolution with a learned kernel.

    Slides ``kernel`` over the spatial axes of the inputs, contracts it with each
    window, and adds ``bias``.

    Args:
        in_features: Number of channels of the inputs.
        out_features: Number of channels of the outputs.
        kernel_size: Extent of the kernel per spatial axis; an int means one axis.
        strides: Step between windows: one int for all spatial axes, or one each;
            ``None`` means 1.
        padding: The values around the inputs along the spatial axes:

            - ``"SAME"``, ``"SAME_LOWER"``: zeros, so that with stride 1 the outputs
              are as long as the inputs; an odd number puts the extra zero at the end,
              or at the start
            - ``"VALID"``: nothing
            - ``"CIRCULAR"``: the inputs again, as on a torus; ``"REFLECT"``: their
              mirror image; both as wide as ``"SAME"`` at stride 1
            - ``"CAUSAL"``: zeros in front, so that no output sees a later input; one
              spatial axis only
            - an int: that many zeros on all sides
            - a sequence with an int or a ``(low, high)`` pair per spatial axis

        input_dilation: Step between neighbouring inputs; larger steps put zeros
            between them.
        kernel_dilation: Step between the inputs that one kernel touches ("atrous").
        feature_group_count: Number of groups that the channels are split into, each
            convolved separately.
        use_bias: Whether there is a bias.
        mask: Multiplied with the kernel on each call; has the kernel's shape.
        dtype: The dtype of the computation and the output; ``None``: inferred from
            inputs and Params.
        param_dtype: The dtype in which the Params are stored.
        precision: Passed to the contraction.
        kernel_init: Initializer of ``kernel``.
        bias_init: Initializer of ``bias``.
        conv_general_dilated: The contraction; called like
            ``jax.lax.conv_general_dilated``.
        promote_dtype: Called as ``promote_dtype((inputs, kernel, bias), dtype=dtype)``.
        preferred_element_type: Dtype in which the contraction accumulates and returns
            its result; ``None``: that of its operands.
        rngs: Gives one key to ``kernel``, then one to ``bias``.
        kernel_metadata: Metadata of the Param ``kernel``.
        bias_metadata: Metadata of the Param ``bias``.

    Attributes:
        kernel: Param, ``[*kernel_size, in_features // feature_group_count,
            out_features]``.
        bias: Param, ``[out_features]``, or ``None``.

    Raises:
        AttributeError: If ``rngs`` has no stream ``params``.

    Example:
        >>> layer = nnx.Conv(1, 1, kernel_size=3, padding="CIRCULAR", rngs=nnx.Rngs(0))
        >>> layer.kernel[...] = jnp.array([1.0, 0.0, -1.0]).reshape(3, 1, 1)
        >>> layer(jnp.array([1.0, 2.0, 4.0, 8.0]).reshape(1, 4, 1)).ravel()
        Array([ 6., -3., -6.,  3.], dtype=float32)
    """

    input_dilation: int | Sequence[int] | None
    feature_group_count: int
    conv_general_dilated: ConvGeneralDilatedT

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] | None = 1,
        *,
        padding: PaddingLike = "SAME",
        input_dilation: int | Sequence[int] | None = 1,
        kernel_dilation: int | Sequence[int] | None = 1,
        feature_group_count: int = 1,
        use_bias: bool = True,
        mask: Num[ArrayLike, "*kernel_shape"] | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = linear.default_kernel_init,
        bias_init: Initializer = linear.default_bias_init,
        conv_general_dilated: ConvGeneralDilatedT = jax.lax.conv_general_dilated,
        promote_dtype: PromoteDtypeFn = arguments.promote_dtype,
        preferred_element_type: Dtype | None = None,
        rngs: Rngs,
        kernel_metadata: Mapping[str, Any] = arguments.NO_METADATA,
        bias_metadata: Mapping[str, Any] = arguments.NO_METADATA,
    ):
        arguments.check_sizes(
            self,
            in_features=in_features,
            out_features=out_features,
            kernel_size=kernel_size,
        )
        kernel_size = _sizes(kernel_size)
        self.kernel_shape = (
            *kernel_size,
            in_features // feature_group_count,
            out_features,
        )
        self.kernel = arguments.make_param(
            kernel_init, rngs, self.kernel_shape, param_dtype, kernel_metadata
        )
        self.bias = attributes.data(None)
        if use_bias:
            self.bias = arguments.make_param(
                bias_init, rngs, (out_features,), param_dtype, bias_metadata
            )
        self.in_features = in_features
        self.out_features = out_features
        self.kernel_size = kernel_size
        self.strides = strides
        self.padding = padding
        self.input_dilation = input_dilation
        self.kernel_dilation = kernel_dilation
        self.feature_group_count = feature_group_count
        self.use_bias = use_bias
        self.mask = mask
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.conv_general_dilated = conv_general_dilated
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type

    def __call__(
        self,
        inputs: Num[ArrayLike, "*batch_spatial in_features"],
        out_sharding: Any = None,
    ) -> Inexact[Array, "*batch_out_spatial out_features"]:
        """Convolves ``inputs`` with the kernel.

        Args:
            inputs: ``[*batch, *spatial, in_features]``, with one spatial axis per entry
                of ``kernel_size`` and any number of batch axes, or none.
            out_sharding: The sharding of the result of the contraction on a mesh with
                explicit axes; ``None``: the one that follows from the operands.

        Returns:
            An array ``[*batch, *out_spatial, out_features]``.

        Raises:
            ValueError: If ``inputs`` has too few axes or the wrong number of channels;
                if ``padding`` has an unknown form, or is ``"CAUSAL"`` with several
                spatial axes; if strides or dilations are not one per spatial
                axis; if the mask's shape differs from the kernel's; or if ``dtype`` is
                neither floating nor complex.
            TypeError: If ``inputs`` is not numeric.
            AssertionError: If ``feature_group_count`` does not divide ``in_features``.
        """
        x = arguments.as_array(inputs)
        _warn_of_one_axis(self, x)
        kernel, bias = _masked_kernel(self), arguments.read(self.bias)
        return convolve(self, x, kernel, bias, out_sharding=out_sharding)


@eager.compiled
def convolve(
    layer: Conv,
    inputs: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    *,
    out_sharding: Any = None,
) -> jax.Array:
    """Convolves inputs as a layer does, with a kernel that may have other outputs."""
    if layer.in_features % layer.feature_group_count:
        # An AssertionError, at call time: existing programs catch it here.
        raise AssertionError(
            f"feature_group_count={layer.feature_group_count} does not divide "
            f"in_features={layer.in_features}."
        )
    batch_shape, x = _flatten_batch(layer, inputs)
    _check_channels(layer, x, kernel.shape[-2] * layer.feature_group_count)
    x, padding, input_dilation = _apply_padding(layer, x)
    x, kernel, bias = linear.promoted(layer, x, kernel, bias)
    if out_sharding is None:
        out_sharding = meshes.of_convolution(x, kernel)
    conv_general_dilated = jax_functions.current(layer.conv_general_dilated)
    y = conv_general_dilated(
        x,
        kernel,
        _per_axis(layer, "strides"),
        padding,
        lhs_dilation=input_dilation,
        rhs_dilation=_per_axis(layer, "kernel_dilation"),
        dimension_numbers=channels_last(len(layer.kernel_size)),
        feature_group_count=layer.feature_group_count,
        **linear.contraction_options(layer, out_sharding),
    )
    arguments.check_not_empty(
        _call_of(layer),
        x,
        y,
        'Pad the inputs, e.g. with padding="SAME", or make them at '
        "least as large as a window.",
    )
    return _restore_batch(linear.add_bias(y, bias), batch_shape)


def _per_axis(layer: Convolution, attribute: str) -> tuple[int, ...]:
    """Reads an attribute that is one int for all spatial axes, or one each."""
    rank = len(layer.kernel_size)
    value = getattr(layer, attribute)
    entries = arguments.per_axis(value, rank)
    if len(entries) != rank:
        raise ValueError(
            f"{type(layer).__name__} with kernel_size={layer.kernel_size} needs {rank} "
            f"{attribute}, one per spatial axis, or an int for all, got {value}."
        )
    return entries


def _flatten_batch(
    layer: Convolution, inputs: jax.Array
) -> tuple[tuple[int, ...], jax.Array]:
    """Merges the batch axes into one; returns their shape and the inputs."""
    rank = len(layer.kernel_size)
    if inputs.ndim < rank + 1:
        raise ValueError(
            f"{type(layer).__name__} with kernel_size={layer.kernel_size} needs inputs "
            f"with at least {rank + 1} axes, [*batch, *spatial, features].\n"
            "Add the missing axes, or give kernel_size fewer entries."
        )
    batch_shape = inputs.shape[: inputs.ndim - rank - 1]
    if len(batch_shape) == 1:
        return batch_shape, inputs
    size = math.prod(batch_shape)
    return batch_shape, inputs.reshape((size, *inputs.shape[len(batch_shape) :]))


def _check_channels(layer: Convolution, x: jax.Array, expected: int) -> None:
    """Refuses inputs ``[batch, *spatial, features]`` with other features."""
    if x.shape[-1] == expected:
        return
    way_out = f"Pass inputs with {expected} features in the last axis."
    if x.shape[1] == expected:
        way_out = (
            "Channels come last, unlike in PyTorch: jnp.moveaxis(x, "
            f"{-1 - len(layer.kernel_size)}, -1) puts them there."
        )
    raise ValueError(
        errors.message(
            f"{_call_of(layer)} expects inputs [*batch, *spatial, {expected}].",
            where=f"inputs: {descriptions.describe(x)}",
            way_out=way_out,
        )
    )


def _call_of(layer: Convolution) -> str:
    """Names a layer and what decides about the sizes of its results."""
    return (
        f"{type(layer).__name__} with kernel_size={tuple(layer.kernel_size)}, "
        f"strides={layer.strides}, padding={layer.padding!r}"
    )


def _warn_of_one_axis(layer: Convolution, inputs: jax.Array) -> None:
    """Warns if all axes of an image may be meant, unless it makes no difference."""
    if not isinstance(layer.kernel_size, _OneSize) or inputs.ndim < 4:
        return
    (size,), name = layer.kernel_size, type(layer).__name__
    is_pointwise = (size, *_per_axis(layer, "strides")) == (1, 1)
    if is_pointwise or inputs.shape[-1] != layer.in_features:
        return
    all_axes = (size,) * (inputs.ndim - 2)
    _python.warn_user(
        errors.message(
            f"{name} with kernel_size={size} convolves one axis; those before it are "
            "batch axes.",
            where=f"inputs: {descriptions.describe(inputs)}",
            way_out=f"To convolve all axes of an image, write kernel_size={all_axes}.\n"
            f"To convolve one axis, write kernel_size=({size},), or ignore this with "
            "warnings.filterwarnings('ignore', category=nnx.errors.OneAxisWarning).",
        ),
        errors.OneAxisWarning,
    )


def _restore_batch(outputs: jax.Array, batch_shape: tuple[int, ...]) -> jax.Array:
    """Undoes `_flatten_batch`."""
    if len(batch_shape) == 1:
        return outputs
    return outputs.reshape(batch_shape + outputs.shape[1:])


def _masked_kernel(layer: Convolution) -> jax.Array:
    """Multiplies the kernel of a layer with its mask, if it has one."""
    kernel, mask = layer.kernel[...], layer.mask
    if mask is None:
        return kernel
    mask = mask[...] if _jax.is_ref(mask) else jnp.asarray(mask)
    if mask.shape != tuple(layer.kernel_shape):
        raise ValueError(
            "Mask needs to have the same shape as weights. Shapes are: "
            f"{mask.shape}, {tuple(layer.kernel_shape)}."
        )
    return kernel * mask


def _apply_padding(
    layer: Conv, inputs: jax.Array
) -> tuple[jax.Array, LaxPadding, tuple[int, ...]]:
    """Applies the padding that ``jax.lax.conv_general_dilated`` can't apply.

    Returns:
        The inputs, the padding and the input dilation that are left for it.
    """
    kernel_size, rank = layer.kernel_size, len(layer.kernel_size)
    kernel_dilation = _per_axis(layer, "kernel_dilation")
    strides = _per_axis(layer, "strides")
    input_dilation = _per_axis(layer, "input_dilation")
    padding = arguments.canonicalize_padding(layer.padding, rank)
    if not isinstance(padding, str):
        return inputs, padding, input_dilation
    extents = [
        (k - 1) * d + 1 for k, d in zip(kernel_size, kernel_dilation, strict=True)
    ]
    if padding == "CAUSAL" and rank != 1:
        raise ValueError(
            "Causal padding is only implemented for 1D convolutions, but this one has "
            f"kernel_size={kernel_size}."
        )
    modes = {"CIRCULAR": "wrap", "REFLECT": "reflect", "CAUSAL": "constant"}
    if padding in modes:
        widths = [((n - 1) // 2, n // 2) for n in extents]
        if padding == "CAUSAL":
            widths = [(extents[0] - 1, 0)]
        inputs = jnp.pad(
            _dilate(inputs, input_dilation),
            [(0, 0), *widths, (0, 0)],
            mode=modes[padding],
        )
        return inputs, "VALID", (1,) * rank
    if any(d != 1 for d in input_dilation):
        # jax.lax refuses names together with dilated inputs.
        spatial = [
            max((n - 1) * d + 1, 0)
            for n, d in zip(inputs.shape[1:-1], input_dilation, strict=True)
        ]
        padding = jax.lax.padtype_to_pads(spatial, extents, strides, padding)
    return inputs, padding, input_dilation


def _dilate(inputs: jax.Array, dilation: tuple[int, ...]) -> jax.Array:
    """Puts zeros between neighbours along the spatial axes."""
    if all(d == 1 for d in dilation):
        return inputs
    zero = jnp.zeros((), inputs.dtype)
    interior = [(0, 0, d - 1) for d in dilation]
    return jax.lax.pad(inputs, zero, [(0, 0, 0), *interior, (0, 0, 0)])


def channels_last(rank: int) -> jax.lax.ConvDimensionNumbers:
    """Says which axes of inputs, kernel and outputs are batch, channels and spatial."""
    array = (0, rank + 1, *range(1, rank + 1))
    kernel = (rank + 1, rank, *range(rank))
    return jax.lax.ConvDimensionNumbers(array, kernel, array)


class ConvTranspose(Convolution):
    """A transposed convolution with a learned kernel.

    Adds up one copy of ``kernel`` per position of the inputs, weighted by the input
    there, with neighbouring copies ``strides`` apart; then adds ``bias``.

    Args:
        in_features: Number of channels of the inputs.
        out_features: Number of channels of the outputs.
        kernel_size: Extent of the kernel per spatial axis; an int means one axis.
        strides: How much longer the outputs are than the inputs: one int for all
            spatial axes, or one each; ``None`` means 1.
        padding: The entries to cut off, or add, at the ends of the spatial axes:

            - ``"SAME"``: so that the outputs are ``strides`` times as long as the
              inputs
            - ``"VALID"``: nothing is cut off, so all copies are there in full
            - ``"CIRCULAR"``: as long as ``"SAME"``; entries past one end are added at
              the other, as on a torus
            - an int, or a sequence with an int or a ``(low, high)`` pair per spatial
              axis: the padding of the dilated inputs, as in ``jax.lax.conv_transpose``

        kernel_dilation: Step between the outputs that one input reaches.
        use_bias: Whether there is a bias.
        mask: Multiplied with the kernel on each call; has the kernel's shape.
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

    transpose_kernel: bool

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
        mask: Num[ArrayLike, "*kernel_shape"] | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = linear.default_kernel_init,
        bias_init: Initializer = linear.default_bias_init,
        transpose_kernel: bool = False,
        promote_dtype: PromoteDtypeFn = arguments.promote_dtype,
        preferred_element_type: Dtype | None = None,
        rngs: Rngs,
        kernel_metadata: Mapping[str, Any] = arguments.NO_METADATA,
        bias_metadata: Mapping[str, Any] = arguments.NO_METADATA,
    ):
        arguments.check_sizes(
            self,
            in_features=in_features,
            out_features=out_features,
            kernel_size=kernel_size,
        )
        self.kernel_size = _sizes(kernel_size)
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
        self.kernel = arguments.make_param(
            kernel_init, rngs, self.kernel_shape, param_dtype, kernel_metadata
        )
        self.bias = attributes.data(None)
        if use_bias:
            self.bias = arguments.make_param(
                bias_init, rngs, (out_features,), param_dtype, bias_metadata
            )

    def __call__(
        self, inputs: Num[ArrayLike, "*batch_spatial in_features"]
    ) -> Inexact[Array, "*batch_out_spatial out_features"]:
        """Convolves ``inputs`` with the transpose of the kernel.

        Args:
            inputs: ``[*batch, *spatial, in_features]``, with one spatial axis per entry
                of ``kernel_size`` and any number of batch axes, or none.

        Returns:
            An array ``[*batch, *out_spatial, out_features]``.

        Raises:
            ValueError: If ``inputs`` has too few axes or the wrong number of channels;
                if ``padding`` has an unknown form; if strides or dilations are not
                one per spatial axis; if the mask's shape differs from the kernel's;
                or if ``dtype`` is neither floating nor complex.
            TypeError: If ``inputs`` is not numeric.
        """
        x = arguments.as_array(inputs)
        _warn_of_one_axis(self, x)
        kernel, bias = _masked_kernel(self), arguments.read(self.bias)
        return _convolve_transposed(self, x, kernel, bias)


@eager.compiled
def _convolve_transposed(
    layer: ConvTranspose, inputs: jax.Array, kernel: jax.Array, bias: jax.Array | None
) -> jax.Array:
    """Convolves inputs with the transpose of a kernel."""
    batch_shape, x = _flatten_batch(layer, inputs)
    _check_channels(layer, x, kernel.shape[-1 if layer.transpose_kernel else -2])
    padding = arguments.canonicalize_padding(layer.padding, len(layer.kernel_size))
    strides = _per_axis(layer, "strides")
    x, kernel, bias = linear.promoted(layer, x, kernel, bias)
    y = jax.lax.conv_transpose(
        x,
        meshes.whole(kernel),  # it takes no `out_sharding`
        strides,
        "VALID" if padding == "CIRCULAR" else padding,
        rhs_dilation=_per_axis(layer, "kernel_dilation"),
        dimension_numbers=channels_last(len(strides)),
        transpose_kernel=layer.transpose_kernel,
        **linear.contraction_options(layer, None),
    )
    if padding == "CIRCULAR":
        for axis, stride in enumerate(strides, start=1):
            y = _wrap(y, axis, x.shape[axis] * stride, layer.transpose_kernel)
    arguments.check_not_empty(_call_of(layer), x, y, _TRANSPOSED_PADDING)
    return _restore_batch(linear.add_bias(y, bias), batch_shape)


_TRANSPOSED_PADDING = (
    "Here, padding applies to the dilated inputs, as in jax.lax.conv_transpose: a "
    "padding p of PyTorch is\nkernel_dilation * (kernel_size - 1) - p, and its 0 is "
    'padding="VALID".'
)


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
