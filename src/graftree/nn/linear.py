"""Layers that contract their inputs with a kernel.

``Linear`` contracts the last axis, ``LinearGeneral`` any axes, ``Einsum`` whatever its
equation says. The contraction itself is an argument, so that it can be replaced, by a
quantized one for example. It is called with the keyword ``precision`` always, and with
``preferred_element_type`` and ``out_sharding`` only if these are set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from graftree.annotations import (
    DotGeneralT,
    Dtype,
    Initializer,
    PrecisionLike,
    PromoteDtypeFn,
)
from graftree.core.modules import Module
from graftree.core.rngs import Rngs
from graftree.nn import initializers, parameters, promotion

if TYPE_CHECKING:
    from jaxtyping import Array, Inexact, Num

default_kernel_init = initializers.lecun_normal()
"""The kernel initializer of all layers: truncated normal, variance ``1 / fan_in``."""
default_bias_init = initializers.zeros
"""The bias initializer of all layers."""


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
        promote_dtype: PromoteDtypeFn = promotion.promote_dtype,
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
        self, inputs: Num[Array, "*batch in_features"], out_sharding: Any = None
    ) -> Inexact[Array, "*batch out_features"]:
        """Maps the last axis of ``inputs``.

        Args:
            inputs: ``[*batch, in_features]``; any number of leading axes, also none.
            out_sharding: The sharding of the result on a mesh with explicit axes;
                ``None``: the one that follows from the operands.

        Returns:
            An array ``[*batch, out_features]``.

        Raises:
            TypeError: If the last axis of ``inputs`` has another size.
        """
        inputs, kernel, bias = self.promote_dtype(
            (inputs, parameters.read(self.kernel), parameters.read(self.bias)),
            dtype=self.dtype,
        )
        outputs = self.dot_general(
            inputs,
            kernel,
            (((inputs.ndim - 1,), (0,)), ((), ())),
            **contraction_options(self, out_sharding),
        )
        return parameters.add_bias(outputs, bias)


def contraction_options(layer: Any, out_sharding: Any = None) -> dict[str, Any]:
    """Collects the keywords that the contraction of a layer is called with.

    Args:
        layer: Has ``precision`` and ``preferred_element_type``.
        out_sharding: The sharding of the result, or ``None``.

    Returns:
        ``precision`` always; the others only if set, so that functions without these
        keywords can be used.
    """
    options = {"precision": layer.precision}
    if layer.preferred_element_type is not None:
        options["preferred_element_type"] = layer.preferred_element_type
    if out_sharding is not None:
        options["out_sharding"] = out_sharding
    return options
