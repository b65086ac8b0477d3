"""A contraction that an equation describes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from graftree.annotations import (
    ArrayLike,
    Dtype,
    EinsumT,
    Initializer,
    PrecisionLike,
    PromoteDtypeFn,
    Shape,
)
from graftree.core.modules.modules import Module
from graftree.core.objects import attributes
from graftree.core.rng.streams import Rngs
from graftree.nn import linear
from graftree.nn.support import arguments, eager, parameters

if TYPE_CHECKING:
    from jaxtyping import Array, Inexact, Num


class Einsum(Module):
    """Contracts its inputs with a kernel as an Einstein summation, and adds a bias.

    The bias varies along those axes of the result whose letters the kernel also has.
    Its elements are laid out in the order of these letters in the result.

    Args:
        einsum_str: The equation, ``"inputs,kernel->outputs"``, with ellipses where
            wanted; spaces are ignored. ``None``: each call gives one.
        kernel_shape: The shape of the kernel.
        bias_shape: The shape of the bias; ``None``: there is none.
        dtype: The dtype of the computation and the output; ``None``: inferred from
            inputs and Params.
        param_dtype: The dtype in which the Params are stored.
        precision: Passed to the contraction.
        kernel_init: Initializer of ``kernel``.
        bias_init: Initializer of ``bias``.
        promote_dtype: Called as ``promote_dtype((inputs, kernel, bias), dtype=dtype)``.
        einsum_op: The contraction; called like ``jax.numpy.einsum``.
        preferred_element_type: Dtype in which the contraction accumulates and returns
            its result; ``None``: that of its operands.
        rngs: Gives one key to ``kernel``, then one to ``bias``.
        kernel_metadata: Metadata of the Param ``kernel``.
        bias_metadata: Metadata of the Param ``bias``.

    Attributes:
        kernel: Param, of shape ``kernel_shape``.
        bias: Param, of shape ``bias_shape``, or ``None``.

    Raises:
        ValueError: If the equation lacks ``->`` or two operands.
        AttributeError: If ``rngs`` has no stream ``params``.

    Example:
        >>> layer = nnx.Einsum("...hd,hdo->...o", (2, 3, 4), (4,), rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((5, 7, 2, 3))).shape
        (5, 7, 4)
    """

    def __init__(
        self,
        einsum_str: str | None,
        kernel_shape: Shape,
        bias_shape: Shape | int | None = None,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = linear.default_kernel_init,
        bias_init: Initializer = linear.default_bias_init,
        promote_dtype: PromoteDtypeFn = arguments.promote_dtype,
        einsum_op: EinsumT = jnp.einsum,
        preferred_element_type: Dtype | None = None,
        rngs: Rngs,
        kernel_metadata: Mapping[str, Any] = parameters.NO_METADATA,
        bias_metadata: Mapping[str, Any] = parameters.NO_METADATA,
    ):
        if einsum_str is not None:
            einsum_str = _checked(einsum_str)
        self.kernel = parameters.new_param(
            rngs, kernel_init, kernel_shape, param_dtype, kernel_metadata
        )
        self.bias = attributes.data(None)
        if bias_shape is not None:
            self.bias = parameters.new_param(
                rngs, bias_init, bias_shape, param_dtype, bias_metadata
            )
        self.einsum_str = einsum_str
        self.kernel_shape = kernel_shape
        self.bias_shape = bias_shape
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.promote_dtype = promote_dtype
        self.einsum_op = einsum_op
        self.preferred_element_type = preferred_element_type

    def __call__(
        self,
        inputs: Num[ArrayLike, "*shape"],
        einsum_str: str | None = None,
        out_sharding: Any = None,
    ) -> Inexact[Array, "*out_shape"]:
        """Contracts ``inputs`` with the kernel.

        Args:
            inputs: The first operand of the equation, an array or a list of numbers.
            einsum_str: An equation to use instead of the attribute.
            out_sharding: The sharding of the result on a mesh with explicit axes;
                ``None``: the one that follows from the operands.

        Returns:
            A new array, of the shape that the equation says.

        Raises:
            ValueError: If there is no equation, if it lacks ``->`` or two operands; if
                ``inputs`` or kernel do not have the axes that it says; or if ``dtype``
                is neither floating nor complex.
            TypeError: If the bias does not fit the result, or ``inputs`` is not
                numeric.
        """
        if einsum_str is None:
            einsum_str = self.einsum_str
        if einsum_str is None:
            raise ValueError(
                "No `einsum_str` argument was provided to Einsum, as argument of the "
                "call or as attribute."
            )
        x = arguments.as_array(inputs)
        return _contracted(
            x,
            self.kernel[...],
            arguments.read(self.bias),
            equation=_checked(einsum_str),
            einsum_op=self.einsum_op,
            **linear.contraction_settings(self, out_sharding),
        )


@eager.fast("numpy.einsum", "lax.dot_general", "numpy.reshape", "lax.reshape")
def _contracted(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    *,
    equation: str,
    einsum_op: EinsumT,
    promote_dtype: PromoteDtypeFn,
    dtype: Dtype | None,
    precision: PrecisionLike,
    preferred_element_type: Dtype | None,
    out_sharding: Any,
) -> jax.Array:
    x, kernel, bias = promote_dtype((x, kernel, bias), dtype=dtype)
    options = arguments.if_set(
        preferred_element_type=preferred_element_type, out_sharding=out_sharding
    )
    outputs = einsum_op(equation, x, kernel, precision=precision, **options)
    if bias is None:
        return outputs
    return outputs + jnp.reshape(bias, _bias_shape(equation, x.ndim, kernel.shape))


def _checked(einsum_str: str) -> str:
    """Returns the equation without spaces, if it is one of two operands."""
    einsum_str = einsum_str.replace(" ", "")
    if "->" not in einsum_str:
        raise ValueError(
            '`einsum_str` equation must be explicit and include "->", got '
            f"{einsum_str!r}."
        )
    if einsum_str.count(",") != 1:
        raise ValueError(
            "`einsum_str` equation must have exactly two operands and therefore, "
            f"exactly one comma character, instead of {einsum_str.count(',')}: "
            f"{einsum_str!r}."
        )
    return einsum_str


def _bias_shape(
    einsum_str: str, inputs_ndim: int, kernel_shape: Shape
) -> tuple[int, ...]:
    """The shape of the bias against the result: one where the kernel does not vary."""
    operands, outputs = einsum_str.split("->")
    inputs, kernel = operands.split(",")
    widths = (_ellipsis(inputs, inputs_ndim), _ellipsis(kernel, len(kernel_shape)))
    labels = _labels(kernel, widths[1])
    sizes = dict(zip(labels, kernel_shape, strict=True))
    return tuple(sizes.get(label, 1) for label in _labels(outputs, max(widths)))


def _ellipsis(subscripts: str, ndim: int) -> int:
    """How many axes the ellipsis of an operand stands for."""
    return ndim - len(subscripts.replace("...", "")) if "..." in subscripts else 0


def _labels(subscripts: str, width: int) -> Sequence[str | int]:
    """One label per axis; those of an ellipsis are counted from its right end."""
    if "..." not in subscripts:
        return subscripts
    before, after = subscripts.split("...")
    return [*before, *range(-width, 0), *after]
