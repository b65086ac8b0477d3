"""The one activation with a parameter.

The others are those of ``jax.nn`` itself (``tanh`` that of ``jax.numpy``), which the
public namespace imports: they act elementwise on arrays of any shape and are
differentiable. Two are synonyms: ``swish is silu`` and ``hard_swish is hard_silu``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from graftree.annotations import Array, ArrayLike, Dtype, Num, PromoteDtypeFn
from graftree.core.modules.modules import Module
from graftree.core.variables.kinds import Param
from graftree.nn.support import arguments, eager


class PReLU(Module):
    """A leaky rectifier whose slope below zero is learned.

    Computes ``x`` where ``x >= 0`` and ``negative_slope * x`` elsewhere.

    Args:
        negative_slope_init: The initial slope.
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
        negative_slope_metadata: Mapping[str, Any] = arguments.NO_METADATA,
    ):
        self.negative_slope = Param(
            jnp.asarray(negative_slope_init, dtype=param_dtype),
            **negative_slope_metadata,
        )
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype

    @eager.compiled
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
