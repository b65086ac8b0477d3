"""Layers that contract their inputs with a kernel.

``Linear`` contracts the last axis, ``LinearGeneral`` any axes. The contraction itself
is an argument, so it can be replaced, for example by a quantized one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from graftree.annotations import (
    ArrayLike,
    DotGeneralT,
    Dtype,
    Initializer,
    PrecisionLike,
    PromoteDtypeFn,
    Shape,
)
from graftree.core.imprints import HashableMapping
from graftree.core.modules.modules import Module
from graftree.core.rng.streams import Rngs
from graftree.core.variables.metadata import VariableMetadata
from graftree.nn import initializers
from graftree.nn.support import arguments, eager, parameters

if TYPE_CHECKING:
    from jaxtyping import Array, Inexact, Num

default_kernel_init = parameters.lecun_normal
"""The kernel initializer of all layers: truncated normal, variance ``1 / fan_in``."""
default_bias_init = initializers.zeros
"""The bias initializer of all layers."""


@eager.fast(
    *("lax.dot_general", "lax.dot", "lax.dtype", "lax.add", "numpy.add"),
    *("numpy.reshape", "lax.reshape"),
    once=True,
)
def affine(
    inputs: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    *,
    axes: Any,
    bias_shape: Shape | None = None,
    dot_general: DotGeneralT,
    promote_dtype: PromoteDtypeFn,
    dtype: Dtype | None,
    precision: PrecisionLike,
    preferred_element_type: Dtype | None,
    out_sharding: Any,
) -> jax.Array:
    """Computes ``inputs @ kernel + bias``.

    Args:
        inputs: The first operand of the contraction.
        kernel: The second.
        bias: Added to the result; ``None``: nothing is.
        axes: Over which axes, as ``jax.lax.dot_general`` has it.
        bias_shape: The shape of the bias, of the rank of the result; ``None``: it
            varies along the last axis.
        dot_general: The contraction.
        promote_dtype: Brings all three to one dtype, in which they meet.
        dtype: That dtype, or ``None``.
        precision: For the contraction.
        preferred_element_type: For the contraction, if set: one of the user's own need
            not have it.
        out_sharding: Likewise.
    """
    inputs, kernel, bias = promote_dtype((inputs, kernel, bias), dtype=dtype)
    options = arguments.if_set(
        preferred_element_type=preferred_element_type, out_sharding=out_sharding
    )
    outputs = dot_general(inputs, kernel, axes, precision=precision, **options)
    return add_bias(outputs, bias, bias_shape)


def add_bias(
    outputs: jax.Array, bias: jax.Array | None, shape: Shape | None = None
) -> jax.Array:
    """Adds a bias, if there is one; in full rank, as users can forbid to promote it."""
    if bias is None:
        return outputs
    shape = (1,) * (outputs.ndim - 1) + (-1,) if shape is None else shape
    return outputs + jnp.reshape(bias, shape)


def contraction_settings(layer: Any, out_sharding: Any) -> dict[str, Any]:
    """How a layer contracts: its settings that `affine` takes."""
    return {
        "promote_dtype": layer.promote_dtype,
        "dtype": layer.dtype,
        "precision": layer.precision,
        "preferred_element_type": layer.preferred_element_type,
        "out_sharding": out_sharding,
    }


class Linear(Module):
    """An affine map of the last axis.

    Computes ``inputs @ kernel + bias``.

    Args:
        in_features: Size of the last axis of the inputs.
        out_features: Size of the last axis of the outputs.
        use_bias: Whether there is a bias.
        dtype: The dtype of the computation and the output; ``None``: inferred from
            inputs and Params.
        param_dtype: The dtype in which the Params are stored.
        precision: Passed to the contraction.
        kernel_init: Initializer of ``kernel``.
        bias_init: Initializer of ``bias``.
        dot_general: The contraction; called like ``jax.lax.dot_general``.
        promote_dtype: Called as ``promote_dtype((inputs, kernel, bias), dtype=dtype)``.
        preferred_element_type: Dtype in which the contraction accumulates and returns
            its result; ``None``: that of its operands.
        rngs: Gives one key to ``kernel``, then one to ``bias``.
        kernel_metadata: Metadata of the Param ``kernel``.
        bias_metadata: Metadata of the Param ``bias``.

    Attributes:
        kernel: Param, ``[in_features, out_features]``.
        bias: Param, ``[out_features]``, or ``None``.

    Raises:
        AttributeError: If ``rngs`` has no stream ``params``.

    Example:
        >>> layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> layer.kernel[...] = jnp.array([[1.0, 2.0, 3.0], [0.0, 0.0, 1.0]])
        >>> layer(jnp.array([[1.0, 1.0]]))
        Array([[1., 2., 4.]], dtype=float32)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        dot_general: DotGeneralT = jax.lax.dot_general,
        promote_dtype: PromoteDtypeFn = arguments.promote_dtype,
        preferred_element_type: Dtype | None = None,
        rngs: Rngs,
        kernel_metadata: Mapping[str, Any] = parameters.NO_METADATA,
        bias_metadata: Mapping[str, Any] = parameters.NO_METADATA,
    ):
        self.kernel = parameters.new_param(
            rngs, kernel_init, (in_features, out_features), param_dtype, kernel_metadata
        )
        self.bias = parameters.optional_param(
            use_bias, rngs, bias_init, (out_features,), param_dtype, bias_metadata
        )
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.dot_general = dot_general
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type

    def __call__(
        self, inputs: Num[ArrayLike, "*batch in_features"], out_sharding: Any = None
    ) -> Inexact[Array, "*batch out_features"]:
        """Maps the last axis of ``inputs``.

        Args:
            inputs: ``[*batch, in_features]``, an array or a list of numbers; any number
                of leading axes, or none.
            out_sharding: The sharding of the result on a mesh with explicit axes;
                ``None``: the one that follows from the operands.

        Returns:
            An array ``[*batch, out_features]``.

        Raises:
            TypeError: If the last axis of ``inputs`` has the wrong size, or ``inputs``
                is not numeric.
            ValueError: If ``dtype`` is neither floating nor complex.
        """
        x = arguments.as_array(inputs)
        return affine(
            x,
            self.kernel[...],
            arguments.read(self.bias),
            axes=(((x.ndim - 1,), (0,)), ((), ())),
            dot_general=self.dot_general,
            **contraction_settings(self, out_sharding),
        )


class LinearGeneral(Module):
    """An affine map of any axes of the inputs to any number of new axes.

    Contracts the inputs with the kernel over ``axis``. Along the ``batch_axis``, if
    any, kernel and bias differ from entry to entry.

    The kernel is initialized as a matrix and then reshaped, so it has the values, and
    their variance, of a `Linear` between flattened features.

    Args:
        in_features: Sizes of the contracted axes of the inputs, in the order that these
            axes have there. An int means one axis, here and below.
        out_features: Sizes of the new axes, which come last in the outputs.
        axis: The axes to contract, always taken from left to right, whatever order
            they are given in.
        batch_axis: Leading axes along which kernel and bias vary, mapped to their
            sizes: ``{0: size}``, ``{0: size, 1: size}`` and so on.
        use_bias: Whether there is a bias.
        dtype: The dtype of the computation and the output; ``None``: inferred from
            inputs and Params.
        param_dtype: The dtype in which the Params are stored.
        kernel_init: Initializer of ``kernel``, called with the shape of a matrix.
        bias_init: Initializer of ``bias``, called with the shape of a vector.
        precision: Passed to the contraction.
        promote_dtype: Called as ``promote_dtype((inputs, kernel, bias), dtype=dtype)``.
        dot_general: The contraction; ``None``: ``jax.lax.dot_general``.
        dot_general_cls: Makes the contraction on each call; takes precedence over
            ``dot_general``.
        preferred_element_type: Dtype in which the contraction accumulates and returns
            its result; ``None``: that of its operands.
        rngs: Gives one key to ``kernel``, then one to ``bias``.
        kernel_metadata: Metadata of the Param ``kernel``.
        bias_metadata: Metadata of the Param ``bias``.

    Attributes:
        kernel: Param, ``[*batch sizes, *in_features, *out_features]``.
        bias: Param, ``[*batch sizes, *out_features]``, or ``None``.

    Raises:
        ValueError: If ``in_features`` and ``axis`` differ in length, or if the batch
            axes are not ``0, 1, ...``.
        AttributeError: If ``rngs`` has no stream ``params``.

    Example:
        >>> layer = nnx.LinearGeneral((2, 3), (4, 5), axis=(1, 2), rngs=nnx.Rngs(0))
        >>> layer.kernel.shape, layer(jnp.ones((7, 2, 3))).shape
        ((2, 3, 4, 5), (7, 4, 5))
    """

    def __init__(
        self,
        in_features: int | Sequence[int],
        out_features: int | Sequence[int],
        *,
        axis: int | Sequence[int] = -1,
        batch_axis: Mapping[int, int] = parameters.NO_METADATA,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        precision: PrecisionLike = None,
        promote_dtype: PromoteDtypeFn = arguments.promote_dtype,
        dot_general: DotGeneralT | None = None,
        dot_general_cls: Callable[[], DotGeneralT] | None = None,
        preferred_element_type: Dtype | None = None,
        rngs: Rngs,
        kernel_metadata: Mapping[str, Any] = parameters.NO_METADATA,
        bias_metadata: Mapping[str, Any] = parameters.NO_METADATA,
    ):
        self.in_features = arguments.sizes(in_features)
        self.out_features = arguments.sizes(out_features)
        self.axis = arguments.sizes(axis)
        self.batch_axis = HashableMapping(batch_axis)
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.dot_general = dot_general
        self.dot_general_cls = dot_general_cls
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type
        if len(self.in_features) != len(self.axis):
            raise ValueError(
                "in_features and axis must have the same length. "
                f"Got {self.in_features} and {self.axis}."
            )
        batch = _batch_sizes(batch_axis)
        rows = math.prod(batch) * math.prod(self.in_features)
        columns = math.prod(self.out_features)
        kernel_init = _on_flat_shape(kernel_init, (rows, columns))
        shape = (*batch, *self.in_features, *self.out_features)
        self.kernel = parameters.new_param(
            rngs, kernel_init, shape, param_dtype, kernel_metadata
        )
        bias_init = _on_flat_shape(bias_init, (math.prod(batch) * columns,))
        shape = (*batch, *self.out_features)
        self.bias = parameters.optional_param(
            use_bias, rngs, bias_init, shape, param_dtype, bias_metadata
        )

    def __call__(
        self, inputs: Num[ArrayLike, "*shape"], out_sharding: Any = None
    ) -> Inexact[Array, "*out_shape"]:
        """Maps the axes ``axis`` of ``inputs``.

        Args:
            inputs: An array, or list, with ``in_features`` entries along ``axis``.
            out_sharding: The sharding of the result on a mesh with explicit axes;
                ``None``: the one that follows from the operands.

        Returns:
            An array with the batch axes, the axes of ``inputs`` that are not
            contracted, and then the axes ``out_features``.

        Raises:
            TypeError: If ``inputs`` lacks an axis, has the wrong sizes, or is not
                numeric.
            ValueError: If ``dtype`` is neither floating nor complex.
        """
        x = arguments.as_array(inputs)
        axis = tuple(sorted([a + x.ndim if a < 0 else a for a in self.axis]))
        batch = tuple(range(len(self.batch_axis)))
        kernel_axis = tuple(range(len(batch), len(batch) + len(axis)))
        kept = [n for n in range(x.ndim) if n not in axis]
        sizes = [x.shape[n] if n in batch else 1 for n in kept]
        return affine(
            x,
            self.kernel[...],
            arguments.read(self.bias),
            axes=((axis, kernel_axis), (batch, batch)),
            bias_shape=(*sizes, *self.out_features),
            dot_general=self._contraction(),
            **contraction_settings(self, out_sharding),
        )

    def _contraction(self) -> DotGeneralT:
        """The function that contracts inputs and kernel."""
        if self.dot_general_cls is not None:
            return self.dot_general_cls()
        return jax.lax.dot_general if self.dot_general is None else self.dot_general


def _batch_sizes(batch_axis: Mapping[int, int]) -> tuple[int, ...]:
    """The sizes of the batch axes, which must be the leading ones."""
    axes = tuple(sorted(batch_axis))
    if axes != tuple(range(len(axes))):
        raise ValueError(
            f"The batch axes {axes} of LinearGeneral must be consecutive leading "
            "dimensions starting from 0."
        )
    return tuple(batch_axis[axis] for axis in axes)


def _on_flat_shape(initializer: Initializer, flat_shape: Shape) -> Initializer:
    """An initializer that calls another with ``flat_shape``, then reshapes the result.

    Initializers scale their values by the fan-in, which they read off a matrix.
    """

    def initialize(key: jax.Array, shape: Shape, dtype: Dtype) -> Any:
        value = parameters.first_value(initializer, key, flat_shape, dtype)
        if isinstance(value, VariableMetadata):
            raw_value = jnp.reshape(value.raw_value, shape)
            return dataclasses.replace(value, raw_value=raw_value)
        return jnp.reshape(value, shape)

    return initialize
