"""Recurrent cells: what a recurrent network does in one step of time.

A cell maps ``(carry, inputs)`` to ``(new_carry, outputs)``. The carry is what it
remembers, for the cells here one or two arrays ``[*batch, hidden_features]``. `RNN`
applies a cell along a sequence; any Module with the members of `RNNCellBase` is one.

This file has what cells share. The cells are in `single_state_cells.py` and, those with
a memory, in `lstm_cells.py`.
"""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from graftree import errors
from graftree.annotations import Dtype, Initializer, Shape
from graftree.core.modules.modules import Module
from graftree.core.objects import attributes
from graftree.core.rng.streams import Rngs, RngStream
from graftree.nn import initializers, linear

_orthogonal = initializers.orthogonal()


def modified_orthogonal(
    key: jax.Array, shape: Shape, dtype: Dtype = jnp.float32
) -> jax.Array:
    """Draws an orthogonal matrix in the default float dtype, then converts it.

    That is float32, unless 64-bit types are switched on.

    Args:
        key: A random key.
        shape: The shape; the axes before the last make the rows.
        dtype: The dtype of the result, which may be one of half precision.

    Returns:
        An array with orthonormal columns, or rows if there are fewer of these.

    Example:
        >>> from graftree.nn.recurrent import modified_orthogonal
        >>> q = modified_orthogonal(jax.random.key(0), (2, 2))
        >>> jnp.abs(q.T @ q).round(3)
        Array([[1., 0.],
               [0., 1.]], dtype=float32)
    """
    return _orthogonal(key, shape, float).astype(dtype)


def orthogonal(key: jax.Array, shape: Shape, dtype: Dtype = jnp.float32) -> jax.Array:
    """Draws an orthogonal matrix, like ``jax.nn.initializers.orthogonal()``.

    Half precision, for which JAX has no QR decomposition, is converted from float32.

    Args:
        key: A random key.
        shape: The shape; the axes before the last make the rows.
        dtype: The dtype of the result.
    """
    wide = jnp.promote_types(dtype, jnp.float32)
    return _orthogonal(key, shape, wide).astype(dtype)


class RNNCellBase(Module):
    """The members of a recurrent cell; the base class of those of this library.

    Raises:
        NotImplementedError: By each member that a subclass does not define.

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
        """Does one step.

        Args:
            carry: What the cell remembers: a pytree of arrays.
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
        """How many axes of the inputs, the last ones, are no batch axes."""
        raise NotImplementedError


class VectorCell(RNNCellBase):
    """What the cells of this library share: features and states are vectors.

    A subclass sets the attributes ``in_features``, ``hidden_features``,
    ``param_dtype``, ``rngs`` and ``carry_init``.

    Attributes:
        num_states: How many arrays are carried; several are a tuple.
    """

    num_states: ClassVar[int] = 1

    def initialize_carry(
        self,
        input_shape: Shape,
        rngs: Rngs | RngStream | None = None,
        carry_init: Initializer | None = None,
    ) -> Any:
        """Makes the carry of the first step.

        Args:
            input_shape: The shape of the inputs of one step, ``[*batch, in_features]``;
                its last entry does not count.
            rngs: Gives one key for each array: an Rngs from its stream ``carry``, or an
                RngStream. ``None``: the cell's own stream, if it has one.
            carry_init: The initializer of each array; ``None``: that of the
                constructor, or else zeros.

        Returns:
            An array ``[*batch, hidden_features]`` of dtype ``param_dtype``, or a tuple
            of such arrays.

        Raises:
            ValueError: If there are no ``rngs``.
            AttributeError: If ``rngs`` has no stream ``carry``.
            TypeError: If ``rngs`` is something else.
        """
        stream = _carry_stream(self, rngs)
        initializer = carry_init or self.carry_init or initializers.zeros
        shape = (*input_shape[:-1], self.hidden_features)
        states = [
            initializer(_draw_key(stream, initializer), shape, self.param_dtype)
            for _ in range(self.num_states)
        ]
        return states[0] if self.num_states == 1 else tuple(states)

    @property
    def num_feature_axes(self) -> int:
        """How many axes of the inputs are no batch axes: one."""
        return 1


def _carry_stream(cell: VectorCell, rngs: Any) -> RngStream:
    """The stream that the keys of the first carry come from."""
    rngs = cell.rngs if rngs is None else rngs
    if isinstance(rngs, Rngs):
        return rngs.carry
    if isinstance(rngs, RngStream):
        return rngs
    name = type(cell).__name__
    if rngs is None:
        raise ValueError(
            errors.message(
                "RNGs must be provided to initialize the cell carry of a " + name + ".",
                way_out="Pass `rngs=nnx.Rngs(0)`, also where the carry is zeros.",
            )
        )
    raise TypeError(
        f"rngs must be a Rngs or RngStream, but {name}.initialize_carry got "
        f"{type(rngs)}."
    )


def _draw_key(stream: RngStream, initializer: Initializer) -> jax.Array | None:
    """The next key; ``None`` if it can't be drawn now, and is not needed."""
    try:
        return stream()
    except errors.GraftreeError:
        # A trace that closes over a network may not draw, but zeros need no key.
        if initializer is initializers.zeros:
            return None
        raise


def own_stream(
    rngs: Rngs, keep_rngs: bool, carry_init: Initializer | None
) -> RngStream | None:
    """The attribute ``rngs`` of a cell; warns of arguments that should not be used.

    Args:
        rngs: Its stream ``carry`` is forked if ``keep_rngs`` is set.
        keep_rngs: See ``rngs``.
        carry_init: The argument of the constructor.
    """
    if carry_init is not None:
        _warn(
            "carry_init is provided in __init__, so that cells which differ in nothing "
            "else have different graphdefs. Pass it to `initialize_carry` instead."
        )
    if not keep_rngs:
        return attributes.data(None)
    _warn(
        "keep_rngs argument is deprecated. Pass `rngs` to `initialize_carry`, or to "
        "the call of nnx.RNN, instead."
    )
    return rngs.carry.fork()


def _warn(text: str) -> None:
    # Up from here: own_stream, the constructor, that of the metaclass, the caller.
    warnings.warn(text, UserWarning, stacklevel=5)


def new_linear(
    cell: Any, in_features: int, out_features: int, **options: Any
) -> linear.Linear:
    """Makes a part of a cell, with the dtypes of the cell.

    Args:
        cell: Has ``dtype``, ``param_dtype`` and ``promote_dtype``.
        in_features: See `Linear`.
        out_features: See `Linear`.
        **options: Further arguments of `Linear`.
    """
    return linear.Linear(
        in_features,
        out_features,
        dtype=cell.dtype,
        param_dtype=cell.param_dtype,
        promote_dtype=cell.promote_dtype,
        **options,
    )


def states_of(cell: VectorCell, carry: Any, inputs: Any) -> tuple[Any, ...]:
    """Takes a carry apart, after checking that carry and inputs are for this cell.

    Args:
        cell: The cell.
        carry: An array, or ``num_states`` of them.
        inputs: The inputs of the step.

    Returns:
        The arrays of the carry.

    Raises:
        ValueError: If the carry has another number of arrays.
        TypeError: If the shape of an array doesn't fit.
    """
    name, shape = type(cell).__name__, np.shape(inputs)
    if shape[-1:] != (cell.in_features,):
        raise TypeError(
            f"{name} expects inputs of shape [*batch, in_features] with in_features="
            f"{cell.in_features}, got shape {shape}: the contracting dimensions differ."
        )
    states = _listed(cell, carry, len(shape))
    expected = (*shape[:-1], cell.hidden_features)
    for state in states:
        if not _fits(np.shape(state), expected):
            raise TypeError(
                f"{name} expects a carry of shape [*batch, hidden_features], here "
                f"{expected}, got {np.shape(state)}: the contracting dimensions, or "
                "the batches of carry and inputs, differ."
            )
    return states


def _listed(cell: VectorCell, carry: Any, ndim: int) -> tuple[Any, ...]:
    """The arrays of a carry, if it has as many as the cell carries."""
    count, structure = cell.num_states, jax.tree.structure(carry)
    is_array = jax.tree_util.all_leaves([carry])
    if count == 1 and is_array:
        return (carry,)
    # An array with one more axis, for the states, can be taken apart, too.
    is_stacked = is_array and np.ndim(carry) == ndim + 1
    if count > 1 and (is_stacked or isinstance(carry, tuple | list)):
        states = tuple(carry)
        if len(states) == count:
            return states
    wanted = "one array" if count == 1 else f"a tuple of {count} arrays"
    raise ValueError(
        errors.message(
            f"{type(cell).__name__} expects {wanted} as carry, got {structure}.",
            way_out="`cell.initialize_carry(inputs.shape, rngs)` makes one.",
        )
    )


def _fits(shape: Shape, expected: Shape) -> bool:
    """Whether a carry has the right features, and can be broadcast to the batch."""
    try:
        # That of NumPy takes no symbolic dimensions, as `jax.export` has them.
        jnp.broadcast_shapes(shape[:-1], expected[:-1])
    except ValueError:
        return False
    return shape[-1:] == expected[-1:]
