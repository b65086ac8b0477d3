"""Recurrent cells: the work of a recurrent network in one time step.

A cell maps ``(carry, inputs)`` to ``(new_carry, outputs)``. The carry is what it
remembers: the state ``h``, or for the LSTM cells the memory ``c`` and the state, each
``[*batch, hidden_features]``. `RNN` applies a cell along a sequence; any Module with
the members of `RNNCellBase` is a cell.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from graftree import errors
from graftree.annotations import (
    Array,
    ArrayLike,
    Dtype,
    Inexact,
    Initializer,
    Num,
    PromoteDtypeFn,
    Shape,
)
from graftree.core.modules.modules import Module
from graftree.core.objects import methods
from graftree.core.rng.streams import Rngs, RngStream
from graftree.nn import compute_dtypes, initializers, linear
from graftree.nn.support import arguments, arithmetic, eager, jax_functions, meshes

State: TypeAlias = "Inexact[Array, '*batch hidden_features']"
StateLike: TypeAlias = "Inexact[ArrayLike, '*batch hidden_features']"

_orthogonal = initializers.orthogonal()


def modified_orthogonal(
    key: jax.Array, shape: Shape, dtype: Dtype = jnp.float32
) -> jax.Array:
    """Draws an orthogonal matrix in the default float dtype, then converts it.

    The default is float32, unless 64-bit types are enabled.

    Args:
        key: A random key.
        shape: The shape; all axes before the last together count as rows.
        dtype: The dtype of the result; half precision is fine.

    Returns:
        An array with orthonormal columns, or rows if it has fewer rows.

    Example:
        >>> from graftree.nn.recurrent import modified_orthogonal
        >>> q = modified_orthogonal(jax.random.key(0), (2, 2))
        >>> jnp.abs(q.T @ q).round(3)
        Array([[1., 0.],
               [0., 1.]], dtype=float32)
    """
    return _orthogonal(key, shape, float).astype(dtype)


def orthogonal(key: jax.Array, shape: Shape, dtype: Dtype = jnp.float32) -> jax.Array:
    """Draws an orthogonal matrix; in float32 if JAX has no QR decomposition of it."""
    wide = arithmetic.wide_dtype(dtype, jnp.float32)
    return _orthogonal(key, shape, wide).astype(dtype)


class RNNCellBase(Module):
    """The interface of recurrent cells; the base class of the cells of this library.

    Raises:
        NotImplementedError: If a member is used that the subclass does not define.

    Example:
        >>> class Sum(nnx.RNNCellBase):
        ...     num_feature_axes = 1
        ...
        ...     def __call__(self, carry, inputs):
        ...         return carry + inputs, carry + inputs
        ...
        ...     def initialize_carry(self, input_shape, rngs=None, carry_init=None):
        ...         return jnp.zeros(input_shape)
        >>> nnx.RNN(Sum())(jnp.array([[1.0], [2.0], [3.0]])).ravel()
        Array([1., 3., 6.], dtype=float32)
    """

    def __call__(self, carry: Any, inputs: Any) -> tuple[Any, Any]:
        """Computes one step.

        Args:
            carry: The memory of the cell: a pytree of arrays.
            inputs: The inputs of this step, ``[*batch, *features]``.

        Returns:
            The carry for the next step, with the structure, shapes and dtypes of
            ``carry``, and the outputs of this step.
        """
        raise NotImplementedError

    def initialize_carry(
        self,
        input_shape: Shape,
        rngs: Rngs | RngStream | None = None,
        carry_init: Initializer | None = None,
    ) -> Any:
        """Makes the carry of the first step.

        Args:
            input_shape: The shape of the inputs of one step.
            rngs: Gives the keys of ``carry_init``.
            carry_init: The initializer of each array of the carry.
        """
        raise NotImplementedError

    @property
    def num_feature_axes(self) -> int:
        """How many of the last axes of the inputs are not batch axes."""
        raise NotImplementedError


class VectorCell(RNNCellBase):
    """Base of the cells of this library: features and states are vectors.

    Attributes:
        num_states: How many arrays are carried; several are a tuple.
    """

    num_states: ClassVar[int] = 1
    in_features: int
    hidden_features: int
    dtype: Dtype | None
    param_dtype: Dtype
    activation_fn: Callable[..., Any]
    promote_dtype: PromoteDtypeFn
    rngs: RngStream | None
    carry_init: Initializer | None

    @methods.named
    def initialize_carry(
        self,
        input_shape: Shape,
        rngs: Rngs | RngStream | None = None,
        carry_init: Initializer | None = None,
    ) -> Any:
        """Makes the carry of the first step.

        Args:
            input_shape: The shape of the inputs of one step, ``[*batch, in_features]``;
                its last entry is ignored.
            rngs: Gives one key for each array: an Rngs from its stream ``carry``, or an
                RngStream. ``None``: the cell's own stream, if it has one.
            carry_init: The initializer of each array; ``None``: that of the
                constructor, or else zeros.

        Returns:
            An array ``[*batch, hidden_features]`` in the dtype of the Params, or a
            tuple of such arrays.

        Raises:
            ValueError: If there are no ``rngs``.
            AttributeError: If ``rngs`` has no stream ``carry``.
            TypeError: If ``rngs`` is something else.
        """
        stream = arguments.stream(self, rngs, "carry")
        if stream is None:
            raise ValueError(
                "RNGs must be provided to initialize the cell carry.\n"
                "Pass `rngs=nnx.Rngs(0)`, even if the carry is zeros."
            )
        initializer = carry_init or self.carry_init or initializers.zeros
        shape = (*input_shape[:-1], self.hidden_features)
        stored = compute_dtypes.params_dtype(self)
        dtype = self.param_dtype if stored is None else stored
        states = [
            _first_state(stream, initializer, shape, dtype)
            for _ in range(self.num_states)
        ]
        return states[0] if self.num_states == 1 else tuple(states)

    @property
    def num_feature_axes(self) -> int:
        """How many of the last axes of the inputs are not batch axes: one."""
        return 1


def _first_state(
    stream: RngStream, initializer: Initializer, shape: Shape, dtype: Dtype
) -> jax.Array:
    """One array of the first carry, made with a key of its own."""
    try:
        key = stream()
    except errors.GraftreeError:
        # A trace that closes over a network may not draw, but zeros need no key.
        if initializer is not initializers.zeros:
            raise
        key = None
    return arguments.initial_value(initializer, key, shape, dtype)


def _states(cell: VectorCell, carry: Any, inputs: Any) -> tuple[Any, ...]:
    """Unpacks a carry; refuses one with more or other arrays than the cell carries.

    JAX would turn several arrays into one and one into several, or broadcast a memory.
    """
    count, is_array = cell.num_states, jax.tree_util.all_leaves([carry])
    states: tuple[Any, ...] = ()
    if count == 1 and is_array:
        states = (carry,)
    elif count > 1:
        # An array with one more axis, for the states, can be taken apart too.
        is_stacked = is_array and np.ndim(carry) == np.ndim(inputs) + 1
        if is_stacked or isinstance(carry, tuple | list):
            states = tuple(carry)
    if len(states) != count:
        wanted = "one array" if count == 1 else f"a tuple of {count} arrays"
        raise ValueError(
            f"{type(cell).__name__} expects {wanted} as carry, got "
            f"{jax.tree.structure(carry)}.\n"
            "`cell.initialize_carry(inputs.shape, rngs)` makes one."
        )
    shapes = [np.shape(state) for state in states]
    if any([shape[-1:] != (cell.hidden_features,) for shape in shapes]):
        raise TypeError(
            f"{type(cell).__name__} expects a carry of shape [*batch, hidden_features] "
            f"with hidden_features={cell.hidden_features}, got {shapes}."
        )
    return meshes.led_by(inputs, range(np.ndim(inputs) - 1), states)


class SimpleCell(VectorCell):
    """The classic recurrent cell: one activation of inputs and carry together.

    Computes ``h' = activation_fn(dense_i(x) + dense_h(h))``, with ``h`` added to the
    sum if ``residual``. Carry and output are both ``h'``.

    Args:
        in_features: Size of the last axis of the inputs.
        hidden_features: Size of the last axis of carry and outputs.
        dtype: The dtype in which the layers compute; ``None``: inferred from inputs and
            Params.
        param_dtype: The dtype in which the Params are made; a first carry has that of
            the Params.
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
        rngs: Gives one key for each Param; with ``keep_rngs``, the stream ``carry`` is
            forked first.
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

    residual: bool

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        dtype: Dtype | None = jnp.float32,
        param_dtype: Dtype = jnp.float32,
        carry_init: Initializer | None = None,
        residual: bool = False,
        activation_fn: Callable[..., Any] = jnp.tanh,
        kernel_init: Initializer = linear.default_kernel_init,
        recurrent_kernel_init: Initializer = orthogonal,
        bias_init: Initializer = linear.default_bias_init,
        promote_dtype: PromoteDtypeFn = arguments.promote_dtype,
        keep_rngs: bool = False,
        rngs: Rngs,
        kernel_metadata: Mapping[str, Any] = arguments.NO_METADATA,
        recurrent_kernel_metadata: Mapping[str, Any] = arguments.NO_METADATA,
        bias_metadata: Mapping[str, Any] = arguments.NO_METADATA,
    ):
        arguments.check_sizes(
            self, in_features=in_features, hidden_features=hidden_features
        )
        self.in_features = in_features
        self.hidden_features = hidden_features
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.residual = residual
        self.activation_fn = activation_fn
        self.promote_dtype = promote_dtype
        self.rngs = arguments.cell_stream(rngs, keep_rngs, carry_init)
        new_layer = functools.partial(
            linear.Linear,
            dtype=dtype,
            param_dtype=param_dtype,
            bias_init=bias_init,
            promote_dtype=promote_dtype,
            bias_metadata=bias_metadata,
            rngs=rngs,
        )
        self.dense_h = new_layer(
            hidden_features,
            hidden_features,
            use_bias=False,
            kernel_init=recurrent_kernel_init,
            kernel_metadata=recurrent_kernel_metadata,
        )
        self.dense_i = new_layer(
            in_features,
            hidden_features,
            use_bias=True,
            kernel_init=kernel_init,
            kernel_metadata=kernel_metadata,
        )
        self.carry_init = carry_init

    @eager.compiled
    def __call__(
        self, carry: StateLike, inputs: Num[ArrayLike, "*batch in_features"]
    ) -> tuple[State, State]:
        """Computes one step.

        Args:
            carry: The state ``h``, ``[*batch, hidden_features]``.
            inputs: ``[*batch, in_features]``.

        Returns:
            The new state, twice: as carry and as outputs.

        Raises:
            ValueError: If the carry is not one array.
            TypeError: If a shape does not fit.
        """
        (h,) = _states(self, carry, inputs)
        total = self.dense_i(inputs) + self.dense_h(h)
        if self.residual:
            total = arithmetic.plus(total, h)
        h = jax_functions.current(self.activation_fn)(total)
        return h, h


class GatedCell(VectorCell):
    """A cell that computes all its gates at once, by a layer for inputs and for states.

    Attributes:
        num_gates: How many gates stand side by side in the outputs of both layers.
        bias_of_inputs: Whether ``dense_i`` has the bias; otherwise ``dense_h`` has it.
    """

    num_gates: ClassVar[int]
    bias_of_inputs: ClassVar[bool]
    gate_fn: Callable[..., Any]

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        gate_fn: Callable[..., Any] = jax.nn.sigmoid,
        activation_fn: Callable[..., Any] = jnp.tanh,
        kernel_init: Initializer = linear.default_kernel_init,
        recurrent_kernel_init: Initializer = orthogonal,
        bias_init: Initializer = linear.default_bias_init,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        carry_init: Initializer | None = None,
        promote_dtype: PromoteDtypeFn = arguments.promote_dtype,
        keep_rngs: bool = False,
        rngs: Rngs,
        kernel_metadata: Mapping[str, Any] = arguments.NO_METADATA,
        recurrent_kernel_metadata: Mapping[str, Any] = arguments.NO_METADATA,
        bias_metadata: Mapping[str, Any] = arguments.NO_METADATA,
    ):
        arguments.check_sizes(
            self, in_features=in_features, hidden_features=hidden_features
        )
        self.in_features = in_features
        self.hidden_features = hidden_features
        self.gate_fn = gate_fn
        self.activation_fn = activation_fn
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype
        self.rngs = arguments.cell_stream(rngs, keep_rngs, carry_init)
        new_layer = functools.partial(
            linear.Linear,
            dtype=dtype,
            param_dtype=param_dtype,
            bias_init=bias_init,
            promote_dtype=promote_dtype,
            bias_metadata=bias_metadata,
            rngs=rngs,
        )
        size = self.num_gates * hidden_features
        self.dense_i = new_layer(
            in_features,
            size,
            use_bias=self.bias_of_inputs,
            kernel_init=kernel_init,
            kernel_metadata=kernel_metadata,
        )
        self.dense_h = new_layer(
            hidden_features,
            size,
            use_bias=not self.bias_of_inputs,
            kernel_init=recurrent_kernel_init,
            kernel_metadata=recurrent_kernel_metadata,
        )
        self.carry_init = carry_init


class GRUCell(GatedCell):
    """A gated recurrent unit: gates decide how much of the carry to keep.

    With inputs ``x`` and carry ``h`` it computes

    - ``r = gate_fn(W_r x + b_r + U_r h)``, how much of the carry the candidate sees,
    - ``z = gate_fn(W_z x + b_z + U_z h)``, how much of the carry is kept,
    - ``n = activation_fn(W_n x + b_n + r * (U_n h))``, the candidate,
    - ``h' = (1 - z) * n + z * h``, which is both carry and output.

    The arguments are those of `LSTMCell`.

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

    num_gates: ClassVar[int] = 3
    bias_of_inputs: ClassVar[bool] = True

    @eager.compiled
    def __call__(
        self, carry: StateLike, inputs: Num[ArrayLike, "*batch in_features"]
    ) -> tuple[State, State]:
        """Computes one step; see `SimpleCell`."""
        (h,) = _states(self, carry, inputs)
        gate_fn = jax_functions.current(self.gate_fn)
        activation_fn = jax_functions.current(self.activation_fn)
        x_r, x_z, x_n = jnp.split(self.dense_i(inputs), 3, axis=-1)
        h_r, h_z, h_n = jnp.split(self.dense_h(h), 3, axis=-1)
        r = gate_fn(x_r + h_r)
        z = gate_fn(x_z + h_z)
        n = activation_fn(x_n + r * h_n)
        h = arithmetic.plus((1.0 - z) * n, arithmetic.times(z, h))
        return h, h


class LSTMCell(VectorCell):
    """A cell with long short-term memory; each gate has two layers of its own.

    With inputs ``x``, memory ``c`` and state ``h`` it computes

    - ``i = gate_fn(ii(x) + hi(h))``, how much is written to the memory,
    - ``f = gate_fn(if_(x) + hf(h))``, how much of the memory is kept,
    - ``g = activation_fn(ig(x) + hg(h))``, what is written,
    - ``o = gate_fn(io(x) + ho(h))``, how much of the memory is shown,
    - ``c' = f * c + i * g`` and ``h' = o * activation_fn(c')``.

    The carry is ``(c', h')``, the output ``h'``. `OptimizedLSTMCell` computes the same
    with two layers in all, which is faster.

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
        param_dtype: The dtype in which the Params are made; a first carry has that of
            the Params.
        carry_init: Initializer of both arrays of the first carry; ``None``: zeros.
            Deprecated: pass it to `initialize_carry`.
        promote_dtype: See `Linear`.
        keep_rngs: Whether to keep a stream of random keys for the first carry.
            Deprecated: pass ``rngs`` to `initialize_carry`.
        rngs: Gives one key for each Param; with ``keep_rngs``, the stream ``carry`` is
            forked first.
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
    gate_fn: Callable[..., Any]

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        gate_fn: Callable[..., Any] = jax.nn.sigmoid,
        activation_fn: Callable[..., Any] = jnp.tanh,
        kernel_init: Initializer = linear.default_kernel_init,
        recurrent_kernel_init: Initializer = modified_orthogonal,
        bias_init: Initializer = linear.default_bias_init,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        carry_init: Initializer | None = None,
        promote_dtype: PromoteDtypeFn = arguments.promote_dtype,
        keep_rngs: bool = False,
        rngs: Rngs,
        kernel_metadata: Mapping[str, Any] = arguments.NO_METADATA,
        recurrent_kernel_metadata: Mapping[str, Any] = arguments.NO_METADATA,
        bias_metadata: Mapping[str, Any] = arguments.NO_METADATA,
    ):
        arguments.check_sizes(
            self, in_features=in_features, hidden_features=hidden_features
        )
        self.in_features = in_features
        self.hidden_features = hidden_features
        self.gate_fn = gate_fn
        self.activation_fn = activation_fn
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype
        self.rngs = arguments.cell_stream(rngs, keep_rngs, carry_init)
        new_layer = functools.partial(
            linear.Linear,
            dtype=dtype,
            param_dtype=param_dtype,
            bias_init=bias_init,
            promote_dtype=promote_dtype,
            bias_metadata=bias_metadata,
            rngs=rngs,
        )
        from_inputs = functools.partial(
            new_layer,
            in_features,
            hidden_features,
            use_bias=False,
            kernel_init=kernel_init,
            kernel_metadata=kernel_metadata,
        )
        from_state = functools.partial(
            new_layer,
            hidden_features,
            hidden_features,
            kernel_init=recurrent_kernel_init,
            kernel_metadata=recurrent_kernel_metadata,
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

    @eager.compiled
    def __call__(
        self,
        carry: tuple[StateLike, StateLike],
        inputs: Num[ArrayLike, "*batch in_features"],
    ) -> tuple[tuple[State, State], State]:
        """Computes one step.

        Args:
            carry: The memory and the state, ``[*batch, hidden_features]`` each.
            inputs: ``[*batch, in_features]``.

        Returns:
            ``(c', h')``, and ``h'`` again as outputs.

        Raises:
            ValueError: If the carry is not two arrays.
            TypeError: If a shape does not fit.
        """
        c, h = _states(self, carry, inputs)
        gate_fn = jax_functions.current(self.gate_fn)
        activation_fn = jax_functions.current(self.activation_fn)
        i = gate_fn(self.ii(inputs) + self.hi(h))
        f = gate_fn(self.if_(inputs) + self.hf(h))
        g = activation_fn(self.ig(inputs) + self.hg(h))
        o = gate_fn(self.io(inputs) + self.ho(h))
        c = arithmetic.plus(arithmetic.times(f, c), i * g)
        h = arithmetic.times(o, activation_fn(c))
        return (c, h), h


class OptimizedLSTMCell(GatedCell):
    """A cell with long short-term memory; all gates are computed at once.

    It computes the same as `LSTMCell`: with inputs ``x``, memory ``c`` and state ``h``,
    the four parts of ``dense_i(x) + dense_h(h)`` are ``i, f, g, o``, and

    - ``c' = gate_fn(f) * c + gate_fn(i) * activation_fn(g)``,
    - ``h' = gate_fn(o) * activation_fn(c')``.

    The carry is ``(c', h')``, the output ``h'``. The arguments are those of `LSTMCell`.

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
    num_gates: ClassVar[int] = 4
    bias_of_inputs: ClassVar[bool] = False

    @eager.compiled
    def __call__(
        self,
        carry: tuple[StateLike, StateLike],
        inputs: Num[ArrayLike, "*batch in_features"],
    ) -> tuple[tuple[State, State], State]:
        """Computes one step; see `LSTMCell`."""
        c, h = _states(self, carry, inputs)
        gate_fn = jax_functions.current(self.gate_fn)
        activation_fn = jax_functions.current(self.activation_fn)
        i, f, g, o = jnp.split(self.dense_i(inputs) + self.dense_h(h), 4, axis=-1)
        c = arithmetic.plus(
            arithmetic.times(gate_fn(f), c), gate_fn(i) * activation_fn(g)
        )
        h = arithmetic.times(gate_fn(o), activation_fn(c))
        return (c, h), h
