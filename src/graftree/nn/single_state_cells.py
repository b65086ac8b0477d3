"""Cells that carry one array, which is their output, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from graftree.annotations import Dtype, Initializer, PromoteDtypeFn
from graftree.core.rng.streams import Rngs
from graftree.nn import activations, linear, recurrent_cells
from graftree.nn.support import operations, parameters, promotion

if TYPE_CHECKING:
    from jaxtyping import Array, Inexact, Num

    State = Inexact[Array, "*batch hidden_features"]


class SimpleCell(recurrent_cells.VectorCell):
    """A cell that mixes inputs and carry by one layer: the classic recurrent network.

    Computes ``h' = activation_fn(dense_i(x) + dense_h(h))``, with ``h`` added to the
    sum if ``residual``. Carry and output are both ``h'``.

    Args:
        in_features: Size of the last axis of the inputs.
        hidden_features: Size of the last axis of carry and outputs.
        dtype: The dtype in which the layers compute; ``None``: inferred from inputs and
            Params.
        param_dtype: The dtype in which the Params are stored, and of the first carry.
        carry_init: Initializer of the first carry; ``None``: zeros. Deprecated: pass it
            to `initialize_carry`.
        residual: Whether the carry is added.
        activation_fn: The activation function.
        kernel_init: Initializer of the kernel of ``dense_i``.
        recurrent_kernel_init: Initializer of the kernel of ``dense_h``.
        bias_init: Initializer of the bias.
        promote_dtype: See `Linear`.
        keep_rngs: Whether to keep a stream of random keys for the first carry.
            Deprecated: pass ``rngs`` to `initialize_carry`.
        rngs: Gives one key for each Param; with ``keep_rngs`` before that one from the
            stream ``carry``.
        kernel_metadata: Metadata of the kernel of ``dense_i``.
        recurrent_kernel_metadata: Metadata of the kernel of ``dense_h``.
        bias_metadata: Metadata of the bias.

    Attributes:
        dense_h: `Linear` from the carry, without bias.
        dense_i: `Linear` from the inputs.
        rngs: The cell's own RngStream, or ``None``.

    Raises:
        AttributeError: If ``rngs`` lacks a stream.

    Example:
        >>> cell = nnx.SimpleCell(1, 1, activation_fn=nnx.relu, rngs=nnx.Rngs(0))
        >>> cell.dense_i.kernel[...] = jnp.array([[1.0]])
        >>> cell.dense_h.kernel[...] = jnp.array([[0.5]])
        >>> carry, outputs = cell(jnp.array([[4.0]]), jnp.array([[1.0]]))
        >>> outputs
        Array([[3.]], dtype=float32)

    References:
        Elman, 1990, "Finding Structure in Time".
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        dtype: Dtype | None = jnp.float32,
        param_dtype: Dtype = jnp.float32,
        carry_init: Initializer | None = None,
        residual: bool = False,
        activation_fn: Callable[..., Any] = activations.tanh,
        kernel_init: Initializer = linear.default_kernel_init,
        recurrent_kernel_init: Initializer = recurrent_cells.orthogonal,
        bias_init: Initializer = linear.default_bias_init,
        promote_dtype: PromoteDtypeFn = promotion.promote_dtype,
        keep_rngs: bool = False,
        rngs: Rngs,
        kernel_metadata: Mapping[str, Any] = parameters.NO_METADATA,
        recurrent_kernel_metadata: Mapping[str, Any] = parameters.NO_METADATA,
        bias_metadata: Mapping[str, Any] = parameters.NO_METADATA,
    ):
        self.in_features = in_features
        self.hidden_features = hidden_features
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.residual = residual
        self.activation_fn = activation_fn
        self.promote_dtype = promote_dtype
        self.rngs = recurrent_cells.own_stream(rngs, keep_rngs, carry_init)
        self.dense_h = recurrent_cells.new_linear(
            self,
            hidden_features,
            hidden_features,
            use_bias=False,
            kernel_init=recurrent_kernel_init,
            rngs=rngs,
            kernel_metadata=recurrent_kernel_metadata,
        )
        self.dense_i = recurrent_cells.new_linear(
            self,
            in_features,
            hidden_features,
            kernel_init=kernel_init,
            bias_init=bias_init,
            rngs=rngs,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
        )
        self.carry_init = carry_init

    def __call__(
        self, carry: State, inputs: Num[Array, "*batch in_features"]
    ) -> tuple[State, State]:
        """Does one step.

        Args:
            carry: The state ``h``, ``[*batch, hidden_features]``.
            inputs: ``[*batch, in_features]``.

        Returns:
            The new state, twice: as carry and as outputs.

        Raises:
            ValueError: If the carry is not one array.
            TypeError: If a shape doesn't fit.
        """
        (hidden,) = recurrent_cells.states_of(self, carry, inputs)
        total = self.dense_i(inputs) + self.dense_h(hidden)
        if self.residual:
            total = total + hidden
        hidden = operations.current(self.activation_fn)(total)
        return hidden, hidden


class GRUCell(recurrent_cells.VectorCell):
    """A gated recurrent unit: gates decide how much of the carry is kept.

    With ``x`` the inputs and ``h`` the carry it computes

    - ``r = gate_fn(W_r x + b_r + U_r h)``, how much of the carry the candidate sees,
    - ``z = gate_fn(W_z x + b_z + U_z h)``, how much of the carry is kept,
    - ``n = activation_fn(W_n x + b_n + r * (U_n h))``, the candidate,
    - ``h' = (1 - z) * n + z * h``, which is both carry and output.

    Args:
        in_features: Size of the last axis of the inputs.
        hidden_features: Size of the last axis of carry and outputs.
        gate_fn: The activation function of ``r`` and ``z``.
        activation_fn: The activation function of ``n``.
        kernel_init: Initializer of the kernel of ``dense_i``.
        recurrent_kernel_init: Initializer of the kernel of ``dense_h``.
        bias_init: Initializer of the bias.
        dtype: The dtype in which the layers compute; ``None``: inferred from inputs and
            Params.
        param_dtype: The dtype in which the Params are stored, and of the first carry.
        carry_init: Initializer of the first carry; ``None``: zeros. Deprecated: pass it
            to `initialize_carry`.
        promote_dtype: See `Linear`.
        keep_rngs: Whether to keep a stream of random keys for the first carry.
            Deprecated: pass ``rngs`` to `initialize_carry`.
        rngs: Gives one key for each Param; with ``keep_rngs`` before that one from the
            stream ``carry``.
        kernel_metadata: Metadata of the kernel of ``dense_i``.
        recurrent_kernel_metadata: Metadata of the kernel of ``dense_h``.
        bias_metadata: Metadata of the bias.

    Attributes:
        dense_i: `Linear` from the inputs to the three parts ``r, z, n``, side by side.
        dense_h: `Linear` from the carry to the same, without bias.
        rngs: The cell's own RngStream, or ``None``.

    Raises:
        AttributeError: If ``rngs`` lacks a stream.

    Example:
        >>> cell = nnx.GRUCell(2, 3, rngs=nnx.Rngs(0))
        >>> x = jnp.ones((4, 2))
        >>> carry, outputs = cell(cell.initialize_carry(x.shape, nnx.Rngs(1)), x)
        >>> outputs.shape
        (4, 3)

    References:
        Cho et al., 2014, "Learning Phrase Representations using RNN Encoder-Decoder for
        Statistical Machine Translation", eq. 5 to 8.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        gate_fn: Callable[..., Any] = activations.sigmoid,
        activation_fn: Callable[..., Any] = activations.tanh,
        kernel_init: Initializer = linear.default_kernel_init,
        recurrent_kernel_init: Initializer = recurrent_cells.orthogonal,
        bias_init: Initializer = linear.default_bias_init,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        carry_init: Initializer | None = None,
        promote_dtype: PromoteDtypeFn = promotion.promote_dtype,
        keep_rngs: bool = False,
        rngs: Rngs,
        kernel_metadata: Mapping[str, Any] = parameters.NO_METADATA,
        recurrent_kernel_metadata: Mapping[str, Any] = parameters.NO_METADATA,
        bias_metadata: Mapping[str, Any] = parameters.NO_METADATA,
    ):
        self.in_features = in_features
        self.hidden_features = hidden_features
        self.gate_fn = gate_fn
        self.activation_fn = activation_fn
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype
        self.rngs = recurrent_cells.own_stream(rngs, keep_rngs, carry_init)
        self.dense_i = recurrent_cells.new_linear(
            self,
            in_features,
            3 * hidden_features,
            kernel_init=kernel_init,
            bias_init=bias_init,
            rngs=rngs,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
        )
        self.dense_h = recurrent_cells.new_linear(
            self,
            hidden_features,
            3 * hidden_features,
            use_bias=False,
            kernel_init=recurrent_kernel_init,
            rngs=rngs,
            kernel_metadata=recurrent_kernel_metadata,
        )
        self.carry_init = carry_init

    def __call__(
        self, carry: State, inputs: Num[Array, "*batch in_features"]
    ) -> tuple[State, State]:
        """Does one step.

        Args:
            carry: The state ``h``, ``[*batch, hidden_features]``.
            inputs: ``[*batch, in_features]``.

        Returns:
            The new state, twice: as carry and as outputs.

        Raises:
            ValueError: If the carry is not one array.
            TypeError: If a shape doesn't fit.
        """
        (hidden,) = recurrent_cells.states_of(self, carry, inputs)
        x_r, x_z, x_n = jnp.split(self.dense_i(inputs), 3, axis=-1)
        h_r, h_z, h_n = jnp.split(self.dense_h(hidden), 3, axis=-1)
        gate_fn = operations.current(self.gate_fn)
        r = gate_fn(x_r + h_r)
        z = gate_fn(x_z + h_z)
        n = operations.current(self.activation_fn)(x_n + r * h_n)
        hidden = (1.0 - z) * n + z * hidden
        return hidden, hidden
