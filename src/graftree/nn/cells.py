"""Recurrent cells: the work of a recurrent network in one time step.

A cell maps ``(carry, inputs)`` to ``(new_carry, outputs)``. The carry is what it
remembers: the state ``h``, or for the LSTM cells the memory ``c`` and the state, each
``[*batch, hidden_features]``. `RNN` applies a cell along a sequence; any Module with
the members of `RNNCellBase` is a cell.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from graftree import _python, errors
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
from graftree.core.objects import attributes, methods
from graftree.core.rng.streams import Rngs, RngStream
from graftree.nn import compute_dtypes, initializers, linear
from graftree.nn.support import arguments, eager, meshes

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
    wide = arguments.wide_dtype(dtype, jnp.float32)
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
        """The number of last axes of the inputs that are not batch axes."""
        raise NotImplementedError


class VectorCell(RNNCellBase):
    """The base of the cells of this library: features and states are vectors.

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
                "Pass `rngs=nnx.Rngs(0)`, also where the carry is zeros."
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
        """The number of axes of the inputs that are not batch axes: one."""
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
    return arguments.first_value(initializer, key, shape, dtype)


def _own_stream(
    rngs: Rngs, keep_rngs: bool, carry_init: Initializer | None
) -> RngStream | None:
    """The attribute ``rngs`` of a cell; warns of deprecated arguments."""
    if carry_init is not None:
        _python.warn_user(
            "carry_init is provided in __init__, so that cells which differ in nothing "
            "else have different graphdefs. Pass it to `initialize_carry` instead.",
            UserWarning,
        )
    if not keep_rngs:
        return attributes.data(None)
    _python.warn_user(
        "keep_rngs argument is deprecated. Pass `rngs` to `initialize_carry`, or to "
        "the call of nnx.RNN, instead.",
        UserWarning,
    )
    return rngs.carry.fork()


def _set_up(
    cell: VectorCell, given: Mapping[str, Any]
) -> tuple[Callable[..., linear.Linear], Callable[..., linear.Linear]]:
    """Keeps the arguments of a constructor; makes layers from inputs, and from states.

    Both results take the size of the outputs, and further arguments of a `Linear`.
    """
    names = ("in_features", "hidden_features")
    arguments.check_sizes(cell, **{name: given[name] for name in names})
    arguments.keep(cell, given)
    cell.rngs = _own_stream(given["rngs"], given["keep_rngs"], given["carry_init"])
    names = "dtype param_dtype promote_dtype bias_init bias_metadata rngs".split()
    new_layer = functools.partial(
        linear.Linear, **{name: given[name] for name in names}
    )
    from_inputs = functools.partial(
        new_layer,
        given["in_features"],
        kernel_init=given["kernel_init"],
        kernel_metadata=given["kernel_metadata"],
    )
    from_state = functools.partial(
        new_layer,
        given["hidden_features"],
        kernel_init=given["recurrent_kernel_init"],
        kernel_metadata=given["recurrent_kernel_metadata"],
    )
    return from_inputs, from_state


def _states(cell: VectorCell, carry: Any, inputs: Any) -> tuple[Any, ...]:
    """The arrays of a carry, if they are as many and as large as the cell carries.

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
        from_inputs, from_state = _set_up(self, locals())
        self.dense_h = from_state(hidden_features, use_bias=False)
        self.dense_i = from_inputs(hidden_features)
        self.carry_init = carry_init

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
            total = operator.add(*arguments.alike(total, h))
        h = eager.current(self.activation_fn)(total)
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
        from_inputs, from_state = _set_up(self, locals())
        size = self.num_gates * hidden_features
        self.dense_i = from_inputs(size, use_bias=self.bias_of_inputs)
        self.dense_h = from_state(size, use_bias=not self.bias_of_inputs)
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

    def __call__(
        self, carry: StateLike, inputs: Num[ArrayLike, "*batch in_features"]
    ) -> tuple[State, State]:
        """Computes one step; see `SimpleCell`."""
        (h,) = _states(self, carry, inputs)
        h = _reset_and_updated(
            self.dense_i(inputs),
            self.dense_h(h),
            h,
            gate_fn=self.gate_fn,
            activation_fn=self.activation_fn,
        )
        return h, h


@eager.fast()
def _reset_and_updated(
    from_inputs: jax.Array,
    from_state: jax.Array,
    h: jax.Array,
    *,
    gate_fn: Callable[..., Any],
    activation_fn: Callable[..., Any],
) -> jax.Array:
    """The new state of a `GRUCell`, from what its layers make of inputs and state."""
    x_r, x_z, x_n = jnp.split(from_inputs, 3, axis=-1)
    h_r, h_z, h_n = jnp.split(from_state, 3, axis=-1)
    r = gate_fn(x_r + h_r)
    z = gate_fn(x_z + h_z)
    n = activation_fn(x_n + r * h_n)
    kept = operator.mul(*arguments.alike(z, h))
    return operator.add(*arguments.alike((1.0 - z) * n, kept))


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
        from_inputs, from_state = _set_up(self, locals())
        self.ii = from_inputs(hidden_features, use_bias=False)
        self.if_ = from_inputs(hidden_features, use_bias=False)
        self.ig = from_inputs(hidden_features, use_bias=False)
        self.io = from_inputs(hidden_features, use_bias=False)
        self.hi = from_state(hidden_features)
        self.hf = from_state(hidden_features)
        self.hg = from_state(hidden_features)
        self.ho = from_state(hidden_features)
        self.carry_init = carry_init

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
        i = self.ii(inputs) + self.hi(h)
        f = self.if_(inputs) + self.hf(h)
        g = self.ig(inputs) + self.hg(h)
        o = self.io(inputs) + self.ho(h)
        return _remember(self, c, i, f, g, o)


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

    def __call__(
        self,
        carry: tuple[StateLike, StateLike],
        inputs: Num[ArrayLike, "*batch in_features"],
    ) -> tuple[tuple[State, State], State]:
        """Computes one step; see `LSTMCell`."""
        c, h = _states(self, carry, inputs)
        gates = self.dense_i(inputs) + self.dense_h(h)
        return _remember(self, c, *jnp.split(gates, 4, axis=-1))


def _remember(
    cell: Any, c: jax.Array, i: Any, f: Any, g: Any, o: Any
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """The new carry and the outputs; ``i, f, g, o`` are not yet activated."""
    gate_fn = eager.current(cell.gate_fn)
    activation_fn = eager.current(cell.activation_fn)
    kept = operator.mul(*arguments.alike(gate_fn(f), c))
    c = operator.add(*arguments.alike(kept, gate_fn(i) * activation_fn(g)))
    h = operator.mul(*arguments.alike(gate_fn(o), activation_fn(c)))
    return (c, h), h
