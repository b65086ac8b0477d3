"""Cells with long short-term memory: a state to show, and a memory to keep.

Both compute the same. `LSTMCell` has a layer for each of the eight products of a step,
`OptimizedLSTMCell` one for the inputs and one for the carry, which is faster. Their
carry is the tuple ``(c, h)`` of the memory and the state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp

from graftree.annotations import Dtype, Initializer, PromoteDtypeFn
from graftree.core.rng.streams import Rngs
from graftree.nn import activations, linear, recurrent_cells
from graftree.nn.support import operations, parameters, promotion

if TYPE_CHECKING:
    from jaxtyping import Array, Inexact, Num

    State = Inexact[Array, "*batch hidden_features"]


class LSTMCell(recurrent_cells.VectorCell):
    """A cell with long short-term memory; each gate has two layers of its own.

    With ``x`` the inputs, ``c`` the memory and ``h`` the state it computes

    - ``i = gate_fn(ii(x) + hi(h))``, how much is written to the memory,
    - ``f = gate_fn(if_(x) + hf(h))``, how much of the memory is kept,
    - ``g = activation_fn(ig(x) + hg(h))``, what is written,
    - ``o = gate_fn(io(x) + ho(h))``, how much of the memory is shown,
    - ``c' = f * c + i * g`` and ``h' = o * activation_fn(c')``.

    The carry is ``(c', h')``, the output ``h'``.

    Args:
        in_features: Size of the last axis of the inputs.
        hidden_features: Size of the last axis of memory, state and outputs.
        gate_fn: The activation function of ``i``, ``f`` and ``o``.
        activation_fn: The activation function of ``g`` and ``c'``.
        kernel_init: Initializer of the kernels for the inputs.
        recurrent_kernel_init: Initializer of the kernels for the state.
        bias_init: Initializer of the biases.
        dtype: The dtype in which the layers compute; ``None``: inferred from inputs and
            Params.
        param_dtype: The dtype in which the Params are stored, and of the first carry.
        carry_init: Initializer of both arrays of the first carry; ``None``: zeros.
            Deprecated: pass it to `initialize_carry`.
        promote_dtype: See `Linear`.
        keep_rngs: Whether to keep a stream of random keys for the first carry.
            Deprecated: pass ``rngs`` to `initialize_carry`.
        rngs: Gives one key for each Param; with ``keep_rngs`` before that one from the
            stream ``carry``.
        kernel_metadata: Metadata of the kernels for the inputs.
        recurrent_kernel_metadata: Metadata of the kernels for the state.
        bias_metadata: Metadata of the biases.

    Attributes:
        ii, if_, ig, io: `Linear` from the inputs, without bias.
        hi, hf, hg, ho: `Linear` from the state.
        rngs: The cell's own RngStream, or ``None``.

    Raises:
        AttributeError: If ``rngs`` lacks a stream.

    Example:
        >>> cell = nnx.LSTMCell(2, 3, rngs=nnx.Rngs(0))
        >>> x = jnp.ones((4, 2))
        >>> (c, h), outputs = cell(cell.initialize_carry(x.shape, nnx.Rngs(1)), x)
        >>> c.shape, outputs is h
        ((4, 3), True)

    References:
        Gers, Schmidhuber and Cummins, 2000, "Learning to Forget: Continual Prediction
        with LSTM".
    """

    num_states: ClassVar[int] = 2

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        gate_fn: Callable[..., Any] = activations.sigmoid,
        activation_fn: Callable[..., Any] = activations.tanh,
        kernel_init: Initializer = linear.default_kernel_init,
        recurrent_kernel_init: Initializer = recurrent_cells.modified_orthogonal,
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
        from_inputs = functools.partial(
            recurrent_cells.new_linear,
            self,
            in_features,
            hidden_features,
            use_bias=False,
            kernel_init=kernel_init,
            rngs=rngs,
            kernel_metadata=kernel_metadata,
        )
        from_state = functools.partial(
            recurrent_cells.new_linear,
            self,
            hidden_features,
            hidden_features,
            kernel_init=recurrent_kernel_init,
            bias_init=bias_init,
            rngs=rngs,
            kernel_metadata=recurrent_kernel_metadata,
            bias_metadata=bias_metadata,
        )
        self.ii = from_inputs()
        self.if_ = from_inputs()
        self.ig = from_inputs()
        self.io = from_inputs()
        self.hi = from_state()
        self.hf = from_state()
        self.hg = from_state()
        self.ho = from_state()
        self.carry_init = carry_init

    def __call__(
        self, carry: tuple[State, State], inputs: Num[Array, "*batch in_features"]
    ) -> tuple[tuple[State, State], State]:
        """Does one step.

        Args:
            carry: The memory and the state, ``[*batch, hidden_features]`` each.
            inputs: ``[*batch, in_features]``.

        Returns:
            ``(c', h')``, and ``h'`` once more as outputs.

        Raises:
            ValueError: If the carry is not two arrays.
            TypeError: If a shape doesn't fit.
        """
        memory, state = recurrent_cells.states_of(self, carry, inputs)
        i = self.ii(inputs) + self.hi(state)
        f = self.if_(inputs) + self.hf(state)
        g = self.ig(inputs) + self.hg(state)
        o = self.io(inputs) + self.ho(state)
        return _remember(self, memory, i, f, g, o)


class OptimizedLSTMCell(recurrent_cells.VectorCell):
    """A cell with long short-term memory; all gates are computed at once.

    It computes what `LSTMCell` does: with ``x`` the inputs, ``c`` the memory and ``h``
    the state, ``i, f, g, o`` are the four parts of ``dense_i(x) + dense_h(h)``, and

    - ``c' = gate_fn(f) * c + gate_fn(i) * activation_fn(g)``,
    - ``h' = gate_fn(o) * activation_fn(c')``.

    The carry is ``(c', h')``, the output ``h'``.

    Args:
        in_features: Size of the last axis of the inputs.
        hidden_features: Size of the last axis of memory, state and outputs.
        gate_fn: The activation function of ``i``, ``f`` and ``o``.
        activation_fn: The activation function of ``g`` and ``c'``.
        kernel_init: Initializer of the kernel of ``dense_i``.
        recurrent_kernel_init: Initializer of the kernel of ``dense_h``.
        bias_init: Initializer of the bias.
        dtype: The dtype in which the layers compute; ``None``: inferred from inputs and
            Params.
        param_dtype: The dtype in which the Params are stored, and of the first carry.
        carry_init: Initializer of both arrays of the first carry; ``None``: zeros.
            Deprecated: pass it to `initialize_carry`.
        promote_dtype: See `Linear`.
        keep_rngs: Whether to keep a stream of random keys for the first carry.
            Deprecated: pass ``rngs`` to `initialize_carry`.
        rngs: Gives one key for each Param; with ``keep_rngs`` before that one from the
            stream ``carry``.
        kernel_metadata: Metadata of the kernel of ``dense_i``.
        recurrent_kernel_metadata: Metadata of the kernel of ``dense_h``.
        bias_metadata: Metadata of the bias.

    Attributes:
        dense_i: `Linear` from the inputs to ``i, f, g, o`` side by side, without bias.
        dense_h: `Linear` from the state to the same.
        rngs: The cell's own RngStream, or ``None``.

    Raises:
        AttributeError: If ``rngs`` lacks a stream.

    Example:
        >>> cell = nnx.OptimizedLSTMCell(2, 3, rngs=nnx.Rngs(0))
        >>> cell.dense_i.kernel.shape, cell.dense_h.kernel.shape
        ((2, 12), (3, 12))

    References:
        Gers, Schmidhuber and Cummins, 2000, "Learning to Forget: Continual Prediction
        with LSTM".
    """

    num_states: ClassVar[int] = 2

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
            4 * hidden_features,
            use_bias=False,
            kernel_init=kernel_init,
            rngs=rngs,
            kernel_metadata=kernel_metadata,
        )
        self.dense_h = recurrent_cells.new_linear(
            self,
            hidden_features,
            4 * hidden_features,
            kernel_init=recurrent_kernel_init,
            bias_init=bias_init,
            rngs=rngs,
            kernel_metadata=recurrent_kernel_metadata,
            bias_metadata=bias_metadata,
        )
        self.carry_init = carry_init

    def __call__(
        self, carry: tuple[State, State], inputs: Num[Array, "*batch in_features"]
    ) -> tuple[tuple[State, State], State]:
        """Does one step.

        Args:
            carry: The memory and the state, ``[*batch, hidden_features]`` each.
            inputs: ``[*batch, in_features]``.

        Returns:
            ``(c', h')``, and ``h'`` once more as outputs.

        Raises:
            ValueError: If the carry is not two arrays.
            TypeError: If a shape doesn't fit.
        """
        memory, state = recurrent_cells.states_of(self, carry, inputs)
        total = self.dense_i(inputs) + self.dense_h(state)
        return _remember(self, memory, *jnp.split(total, 4, axis=-1))


def _remember(
    cell: Any, memory: jax.Array, i: Any, f: Any, g: Any, o: Any
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """The new carry and the outputs; ``i, f, g, o`` are not yet activated."""
    gate_fn = operations.current(cell.gate_fn)
    activation_fn = operations.current(cell.activation_fn)
    memory = gate_fn(f) * memory + gate_fn(i) * activation_fn(g)
    state = gate_fn(o) * activation_fn(memory)
    return (memory, state), state
