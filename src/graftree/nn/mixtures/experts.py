"""Experts: layers whose Params are stacked by expert, called with sorted rows.

Experts are called as ``experts(rows, group_sizes)``: the rows of the first expert come
first, then those of the second, and so on. Each row meets the Params of one expert
only, so the cost does not grow with the number of experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from graftree.annotations import (
    Array,
    ArrayLike,
    Dtype,
    Inexact,
    Initializer,
    Integer,
    Num,
    PrecisionLike,
    PromoteDtypeFn,
    Shape,
)
from graftree.core.modules.modules import Module
from graftree.core.objects import attributes
from graftree.core.rng.streams import Rngs
from graftree.core.variables.kinds import Param
from graftree.core.variables.metadata import VariableMetadata
from graftree.nn import linear
from graftree.nn.support import arguments, eager, groups, jax_functions, meshes


class GroupedLinear(Module):
    """An affine map of rows that are sorted by group, each group with its own.

    Computes ``rows @ kernel[g] + bias[g]`` for the rows of each group ``g``.

    Args:
        num_groups: The number of groups.
        in_features: Size of the last axis of the rows.
        out_features: Size of the last axis of the outputs.
        use_bias: Whether there is a bias.
        dtype: The dtype of the computation and the output; ``None``: inferred from
            rows and Params.
        param_dtype: The dtype in which the Params are stored.
        precision: Passed to the contraction.
        kernel_init: Initializer of each group's kernel, called with the shape of one.
        bias_init: Initializer of each group's bias, likewise.
        ragged_dot: The contraction; called like ``jax.lax.ragged_dot``, which is the
            default except on CPUs.
        promote_dtype: Called as ``promote_dtype((rows, kernel, bias), dtype=dtype)``.
        preferred_element_type: Dtype in which the contraction accumulates and returns
            its result; ``None``: that of its operands.
        rngs: Gives one key to ``kernel``, then one to ``bias``.
        kernel_metadata: Metadata of the Param ``kernel``.
        bias_metadata: Metadata of the Param ``bias``.

    Attributes:
        kernel: Param, ``[num_groups, in_features, out_features]``.
        bias: Param, ``[num_groups, out_features]``, or ``None``.

    Raises:
        AttributeError: If ``rngs`` has no stream ``params``.

    Example:
        >>> layer = nnx.GroupedLinear(2, 1, 1, use_bias=False, rngs=nnx.Rngs(0))
        >>> layer.kernel[...] = jnp.array([[[10.0]], [[100.0]]])
        >>> rows = jnp.array([[1.0], [2.0], [3.0]])
        >>> layer(rows, jnp.array([1, 2])).ravel()  # one row, then two
        Array([ 10., 200., 300.], dtype=float32)
    """

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = linear.default_kernel_init,
        bias_init: Initializer = linear.default_bias_init,
        ragged_dot: Callable[..., Any] = groups.ragged_dot,
        promote_dtype: PromoteDtypeFn = arguments.promote_dtype,
        preferred_element_type: Dtype | None = None,
        rngs: Rngs,
        kernel_metadata: Mapping[str, Any] = arguments.NO_METADATA,
        bias_metadata: Mapping[str, Any] = arguments.NO_METADATA,
    ):
        sizes = {"in_features": in_features, "out_features": out_features}
        arguments.check_sizes(self, num_groups=num_groups, **sizes)
        self.kernel = arguments.make_param(
            _for_each(kernel_init),
            rngs,
            (num_groups, in_features, out_features),
            param_dtype,
            kernel_metadata,
        )
        self.bias: Param[jax.Array] | None = attributes.data(None)
        if use_bias:
            self.bias = arguments.make_param(
                _for_each(bias_init),
                rngs,
                (num_groups, out_features),
                param_dtype,
                bias_metadata,
            )
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.ragged_dot = ragged_dot
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type

    @eager.compiled
    def __call__(
        self,
        rows: Num[ArrayLike, "rows in_features"],
        group_sizes: Integer[ArrayLike, "groups"],
    ) -> Inexact[Array, "rows out_features"]:
        """Maps the rows of each group.

        Args:
            rows: ``[rows, in_features]``, sorted by group.
            group_sizes: The number of rows of each group, ``[num_groups]``, together at
                most as many as there are; what becomes of further rows is undefined.

        Returns:
            An array ``[rows, out_features]``.

        Raises:
            TypeError: If the last axis of ``rows`` has the wrong size, or ``rows`` is
                not numeric.
            ValueError: If ``dtype`` is neither floating nor complex.
        """
        params = self.kernel[...], arguments.read(self.bias)
        operands: Any = arguments.as_array(rows), *params
        operands = self.promote_dtype(operands, dtype=self.dtype)
        x, kernel, bias = operands
        options = arguments.if_set(preferred_element_type=self.preferred_element_type)
        y = grouped_dot(self, x, kernel, group_sizes, **options)
        return y if bias is None else y + of_rows(bias, y.shape[0], group_sizes)


def grouped_dot(
    layer: GroupedLinear, rows: Any, kernel: Any, group_sizes: Any, **options: Any
) -> jax.Array:
    """Multiplies rows with a kernel for each group, by the contraction of a layer."""
    # A group may have rows on any device.
    rows, kernel = meshes.whole(rows), meshes.whole(kernel)
    sizes = meshes.whole(jnp.asarray(group_sizes, jnp.int32))
    ragged_dot = jax_functions.current(layer.ragged_dot)
    return ragged_dot(rows, kernel, sizes, precision=layer.precision, **options)


def _for_each(initializer: Initializer) -> Initializer:
    """An initializer of stacked values, each with a key and a scale of its own."""

    def initialize(key: jax.Array, shape: Shape, dtype: Dtype) -> Any:
        count, *own_shape = shape
        metadata: list[VariableMetadata] = []

        def one(key: jax.Array) -> Any:
            value = initializer(key, tuple(own_shape), dtype)
            if isinstance(value, VariableMetadata):
                metadata[:] = [value]
                value = value.raw_value
            return value

        stacked = jax.vmap(one)(jax.random.split(key, count))
        if metadata:
            return dataclasses.replace(metadata[0], raw_value=stacked)
        return stacked

    return initialize


def of_rows(of_groups: Any, count: int, group_sizes: Any) -> jax.Array:
    """Takes for each of some rows what its group has, ``[rows, ...]``."""
    sizes = meshes.whole(jnp.asarray(group_sizes, jnp.int32))
    rows, ends = jnp.arange(count, dtype=jnp.int32), jnp.cumsum(sizes)
    groups_of_rows = jnp.searchsorted(ends, rows, side="right").clip(0, len(ends) - 1)
    return meshes.whole(of_groups)[groups_of_rows]


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Computes ``silu(gate) * up``, the gated activation of most mixtures.

    Args:
        gate: An array of any shape.
        up: An array of the same shape.

    Returns:
        An array of that shape.

    Example:
        >>> nnx.mixtures.swiglu(jnp.array([0.0, 20.0]), jnp.array([3.0, 3.0]))
        Array([ 0., 60.], dtype=float32)

    References:
        Shazeer, 2020, "GLU Variants Improve Transformer", eq. 6.
    """
    return jax.nn.silu(gate) * up


def clamped_swiglu(
    gate: jax.Array, up: jax.Array, *, alpha: float = 1.702, limit: float = 7.0
) -> jax.Array:
    """Computes ``(up + 1) * gate * sigmoid(alpha * gate)`` of clamped values: gpt-oss.

    Args:
        gate: An array of any shape; it is clamped from above to ``limit``.
        up: An array of the same shape; clamped to ``-limit .. limit``.
        alpha: The slope of the sigmoid.
        limit: See above.

    Returns:
        An array of that shape.

    Example:
        >>> nnx.mixtures.clamped_swiglu(jnp.array([0.0, 20.0]), jnp.array([3.0, 30.0]))
        Array([ 0.      , 55.999626], dtype=float32)

    References:
        OpenAI, 2025, "gpt-oss-120b & gpt-oss-20b Model Card", section 2.1.
    """
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)


class GatedExperts(Module):
    """Experts that are gated MLPs: ``down(activation(gate(x), up(x)))``.

    Args:
        num_experts: The number of experts.
        in_features: Size of the last axis of the rows, and of the outputs.
        hidden_features: Size of what ``gate`` and ``up`` give.
        activation: A function of two arrays: `swiglu`, `clamped_swiglu`, or your own.
        use_bias: Whether the three maps have a bias.
        dtype: The dtype of the computation and the output; ``None``: inferred from
            rows and Params.
        param_dtype: The dtype in which the Params are stored.
        precision: Passed to the contractions.
        kernel_init: Initializer of each expert's kernels.
        bias_init: Initializer of each expert's biases.
        ragged_dot: As in `GroupedLinear`.
        promote_dtype: As in `GroupedLinear`.
        preferred_element_type: As in `GroupedLinear`.
        rngs: Gives keys to the Params of ``gate``, ``up`` and ``down``, in this order.
        kernel_metadata: Metadata of the kernels of ``gate`` and ``up``, such as
            ``{"out_sharding": ("expert", None, "model")}``.
        bias_metadata: Metadata of their biases.
        out_kernel_metadata: Metadata of the kernel of ``down``, such as
            ``{"out_sharding": ("expert", "model", None)}``.
        out_bias_metadata: Metadata of its bias.

    Attributes:
        gate: `GroupedLinear`, kernel ``[num_experts, in_features, hidden_features]``.
        up: Likewise.
        down: `GroupedLinear`, kernel ``[num_experts, hidden_features, in_features]``.

    Raises:
        AttributeError: If ``rngs`` has no stream ``params``.

    Example:
        >>> experts = nnx.GatedExperts(4, 8, 16, rngs=nnx.Rngs(0))
        >>> rows = jnp.ones((6, 8))
        >>> experts(rows, jnp.array([1, 0, 3, 2])).shape
        (6, 8)
        >>> experts.gate.kernel.shape, experts.down.kernel.shape
        ((4, 8, 16), (4, 16, 8))
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        hidden_features: int,
        *,
        activation: Callable[[Any, Any], Any] = swiglu,
        use_bias: bool = False,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = linear.default_kernel_init,
        bias_init: Initializer = linear.default_bias_init,
        ragged_dot: Callable[..., Any] = groups.ragged_dot,
        promote_dtype: PromoteDtypeFn = arguments.promote_dtype,
        preferred_element_type: Dtype | None = None,
        rngs: Rngs,
        kernel_metadata: Mapping[str, Any] = arguments.NO_METADATA,
        bias_metadata: Mapping[str, Any] = arguments.NO_METADATA,
        out_kernel_metadata: Mapping[str, Any] = arguments.NO_METADATA,
        out_bias_metadata: Mapping[str, Any] = arguments.NO_METADATA,
    ):
        arguments.check_sizes(
            self,
            num_experts=num_experts,
            in_features=in_features,
            hidden_features=hidden_features,
        )
        options: dict[str, Any] = {
            "use_bias": use_bias,
            "dtype": dtype,
            "param_dtype": param_dtype,
            "precision": precision,
            "kernel_init": kernel_init,
            "bias_init": bias_init,
            "ragged_dot": ragged_dot,
            "promote_dtype": promote_dtype,
            "preferred_element_type": preferred_element_type,
            "rngs": rngs,
        }
        widening = {"kernel_metadata": kernel_metadata, "bias_metadata": bias_metadata}
        sizes = num_experts, in_features, hidden_features
        self.gate = GroupedLinear(*sizes, **widening, **options)
        self.up = GroupedLinear(*sizes, **widening, **options)
        self.down = GroupedLinear(
            num_experts,
            hidden_features,
            in_features,
            kernel_metadata=out_kernel_metadata,
            bias_metadata=out_bias_metadata,
            **options,
        )
        self.activation = activation

    @eager.compiled
    def __call__(
        self,
        rows: Num[ArrayLike, "rows in_features"],
        group_sizes: Integer[ArrayLike, "experts"],
    ) -> Inexact[Array, "rows in_features"]:
        """Applies to each row the expert that it belongs to.

        Args:
            rows: ``[rows, in_features]``, sorted by expert.
            group_sizes: The number of rows of each expert, ``[num_experts]``; see
                `GroupedLinear`.

        Returns:
            An array ``[rows, in_features]``.

        Raises:
            TypeError: If the last axis of ``rows`` has the wrong size, or ``rows`` is
                not numeric.
            ValueError: If ``dtype`` is neither floating nor complex.
        """
        gate, up = self.gate(rows, group_sizes), self.up(rows, group_sizes)
        return self.down(self.activation(gate, up), group_sizes)
