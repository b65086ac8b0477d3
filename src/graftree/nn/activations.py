"""Activation functions, and the one that has a parameter.

All functions are the very objects of ``jax.nn`` (``tanh`` that of ``jax.numpy``), so
they act elementwise on arrays of any shape and are differentiable. Two are synonyms:
``swish is silu`` and ``hard_swish is hard_silu``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from graftree.annotations import ArrayLike, Dtype, PromoteDtypeFn
from graftree.core.modules.modules import Module
from graftree.core.variables.kinds import Param
from graftree.nn.support import arguments, parameters

if TYPE_CHECKING:
    from jaxtyping import Array, Num

__all__ = [
    "PReLU",
    "celu",
    "elu",
    "gelu",
    "glu",
    "hard_sigmoid",
    "hard_silu",
    "hard_swish",
    "hard_tanh",
    "identity",
    "leaky_relu",
    "log_sigmoid",
    "log_softmax",
    "logsumexp",
    "one_hot",
    "relu",
    "relu6",
    "selu",
    "sigmoid",
    "silu",
    "soft_sign",
    "softmax",
    "softplus",
    "standardize",
    "swish",
    "tanh",
]

celu = jax.nn.celu
elu = jax.nn.elu
gelu = jax.nn.gelu
glu = jax.nn.glu
hard_sigmoid = jax.nn.hard_sigmoid
hard_silu = jax.nn.hard_silu
hard_swish = jax.nn.hard_swish
hard_tanh = jax.nn.hard_tanh
identity = jax.nn.identity
leaky_relu = jax.nn.leaky_relu
log_sigmoid = jax.nn.log_sigmoid
log_softmax = jax.nn.log_softmax
logsumexp = jax.nn.logsumexp
one_hot = jax.nn.one_hot
relu = jax.nn.relu
relu6 = jax.nn.relu6
selu = jax.nn.selu
sigmoid = jax.nn.sigmoid
silu = jax.nn.silu
soft_sign = jax.nn.soft_sign
softmax = jax.nn.softmax
softplus = jax.nn.softplus
standardize = jax.nn.standardize
swish = jax.nn.swish
tanh = jnp.tanh


class PReLU(Module):
    """A leaky rectifier whose slope below zero is learned.

    Computes ``x`` where ``x >= 0`` and ``negative_slope * x`` elsewhere.

    Args:
        negative_slope_init: The slope to start with.
        dtype: The dtype of the computation and the output; ``None``: that of the
            inputs, to which the slope is then cast.
        param_dtype: The dtype in which the slope is stored.
        promote_dtype: If ``dtype`` is given, called as
            ``promote_dtype((inputs, negative_slope), dtype=dtype)``.
        negative_slope_metadata: Metadata of the Param ``negative_slope``.

    Attributes:
        negative_slope: Param of shape ``()``.

    Example:
        >>> layer = nnx.PReLU(negative_slope_init=0.25)
        >>> layer(jnp.array([-4.0, 0.0, 4.0]))
        Array([-1.,  0.,  4.], dtype=float32)

    References:
        He et al., 2015, "Delving Deep into Rectifiers", eq. 1.
    """

    def __init__(
        self,
        negative_slope_init: float = 0.01,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        promote_dtype: PromoteDtypeFn = arguments.promote_dtype,
        negative_slope_metadata: Mapping[str, Any] = parameters.NO_METADATA,
    ):
        self.negative_slope = Param(
            jnp.asarray(negative_slope_init, dtype=param_dtype),
            **negative_slope_metadata,
        )
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype

    def __call__(self, inputs: Num[ArrayLike, "*shape"]) -> Num[Array, "*shape"]:
        """Scales the negative entries of ``inputs``.

        Args:
            inputs: An array, or list, of any shape.

        Returns:
            An array of the shape of ``inputs``, in ``dtype`` or that of ``inputs``.

        Raises:
            TypeError: If ``inputs`` is not numeric.
            ValueError: If ``dtype`` is neither floating nor complex.
        """
        x = arguments.as_array(inputs)
        slope = self.negative_slope[...]
        if self.dtype is None:
            slope = jnp.asarray(slope, x.dtype)
        else:
            x, slope = self.promote_dtype((x, slope), dtype=self.dtype)
        return jnp.where(x >= 0, x, slope * x)
