"""Recurrent networks: a cell applied along a sequence, in both directions, in layers.

`RNN` is a scan over time; `Bidirectional` and `StackedRNN` build on it. Its cell may be
any Module with the members of `RNNCellBase`; Variables of the cell, such as the count
of random keys, go from step to step and come back to the caller's cell.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from graftree import _jax
from graftree.annotations import Array, ArrayLike, Filter, Integer, Num
from graftree.core import filters
from graftree.core.graph import flattening
from graftree.core.modules.containers import List
from graftree.core.modules.modules import Module
from graftree.core.objects import attributes, methods
from graftree.core.rng import model_streams
from graftree.core.rng.streams import Rngs, RngState, RngStream
from graftree.core.variables.metadata import var_defaults
from graftree.nn import compute_dtypes
from graftree.nn.cells import RNNCellBase
from graftree.nn.dropout import Dropout
from graftree.nn.support import arguments, arithmetic, meshes
from graftree.transforms.control_flow import loops
from graftree.transforms.control_flow.loop_bodies import Carry
from graftree.transforms.lifting.prefixes import StateAxes


class RNNBase(Protocol):
    """The interface of the networks that `Bidirectional` combines."""

    def __call__(
        self,
        inputs: Any,
        *,
        initial_carry: Any = None,
        rngs: Rngs | RngStream | None = None,
        seq_lengths: Any = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
    ) -> Any:
        """Processes a batch of sequences; the arguments are those of `RNN`."""
        ...


class RNN(Module):
    """Applies a recurrent cell along the sequences of a batch.

    Args:
        cell: The cell.
        time_major: Whether inputs and outputs are ``[time, *batch, *features]``, not
            ``[*batch, time, *features]``.
        return_carry: Whether to return the last carry too.
        reverse: Whether to begin with the last step of each sequence.
        keep_order: Whether the outputs of a reversed sequence are put in the order of
            the inputs; otherwise they stay in the order in which they were made.
        unroll: How many steps are unrolled in the compiled loop.
        state_axes: How the steps share the state of the cell, by filters: `Carry`
            goes from step to step, ``None`` is the same for each step, and an integer
            is an axis along which each step gets its slice. ``None``: everything is
            carried.
        broadcast_rngs: A filter for random streams of the cell. Those that match give
            the same keys in every step, and other keys in the next call.
        rngs: Where the keys of the first carry come from: ``True`` for a stream with a
            constant seed; an Rngs, whose stream ``carry`` is forked, or an RngStream,
            which is forked; ``False`` for none.

    Attributes:
        cell: The cell.
        rngs: The network's own RngStream, or ``None``.
        state_axes: A `StateAxes`.

    Raises:
        ValueError: If ``rngs`` is something else.
        AttributeError: If it lacks the stream ``carry``.

    Example:
        >>> rnn = nnx.RNN(nnx.LSTMCell(2, 3, rngs=nnx.Rngs(0)))
        >>> x = jnp.ones((4, 5, 2))
        >>> rnn(x).shape
        (4, 5, 3)
        >>> (c, h), outputs = rnn(x, return_carry=True)
        >>> bool((h == outputs[:, -1]).all())
        True
    """

    def __init__(
        self,
        cell: RNNCellBase,
        *,
        time_major: bool = False,
        return_carry: bool = False,
        reverse: bool = False,
        keep_order: bool = False,
        unroll: int = 1,
        state_axes: Mapping[Any, int | type[Carry] | None] | None = None,
        broadcast_rngs: Filter = None,
        rngs: Rngs | RngStream | bool = True,
    ):
        self.cell = cell
        self.time_major = time_major
        self.return_carry = return_carry
        self.reverse = reverse
        self.keep_order = keep_order
        self.unroll = unroll
        if not isinstance(rngs, Rngs | RngStream | bool):
            raise ValueError(
                "Expected rngs to be a Rngs, a RngStream or a bool in nnx.RNN, got "
                f"{type(rngs)}."
            )
        self.rngs = attributes.data(_new_stream(rngs))
        self.state_axes = StateAxes({...: Carry} if state_axes is None else state_axes)
        self.broadcast_rngs = broadcast_rngs

    def __call__(
        self,
        inputs: Num[ArrayLike, "*shape"],
        *,
        initial_carry: Any = None,
        seq_lengths: Integer[ArrayLike, "*batch"] | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
        rngs: Rngs | RngStream | None = None,
    ) -> Any:
        """Processes a batch of sequences.

        Args:
            inputs: ``[*batch, time, *features]``, or ``[time, *batch, *features]``; any
                number of batch axes, or none.
            initial_carry: The carry of the first step; ``None``: the cell makes one.
            seq_lengths: How many steps each sequence has, ``[*batch]``; the rest is
                padding. The outputs there are not masked. ``None``: all steps.
            return_carry: Overrides the attribute, if not ``None``; so do the next
                three.
            time_major: See `RNN`.
            reverse: See `RNN`. The padding stays at the end.
            keep_order: See `RNN`.
            rngs: Gives the keys of the first carry: an Rngs, whose stream ``carry`` is
                forked, or an RngStream. ``None``: the network's own stream.

        Returns:
            The outputs, in the layout of the inputs; or a tuple of the carry and the
            outputs. The carry is the one after the last step of each sequence, or the
            first carry for an empty one.

        Raises:
            ValueError: If the inputs have too few axes, or ``seq_lengths`` doesn't fit;
                or if the first carry needs ``rngs`` and there are none.
            TypeError: If the cell can't take inputs or carry of these shapes.
        """
        return_carry = self.return_carry if return_carry is None else return_carry
        time_major = self.time_major if time_major is None else time_major
        reverse = self.reverse if reverse is None else reverse
        keep_order = self.keep_order if keep_order is None else keep_order
        inputs = jnp.asarray(inputs)
        num_batch = _num_batch_axes(self.cell, inputs.shape, time_major)
        axis = 0 if time_major else num_batch
        step_shape = inputs.shape[:axis] + inputs.shape[axis + 1 :]
        lengths = _checked_lengths(seq_lengths, step_shape[:num_batch])
        if reverse:
            inputs = flip_sequences(inputs, lengths, num_batch, time_major)
        is_valid = None
        if return_carry and lengths is not None:
            steps = jnp.arange(inputs.shape[axis]).reshape((-1,) + (1,) * num_batch)
            is_valid = steps < lengths[None]  # [time, *batch]: no padding
        with arguments.undone_on_failure(*_streams(self, rngs)):
            forked = rngs.carry.fork() if isinstance(rngs, Rngs) else rngs
            stream = arguments.stream(self, forked, "carry")
            if initial_carry is None:
                initial_carry = self.cell.initialize_carry(step_shape, stream)
            batch_axes = [n for n in range(num_batch + 1) if n != axis]
            initial_carry = meshes.led_by(inputs, batch_axes, initial_carry)
            carry, outputs = self._scan(initial_carry, inputs, is_valid, axis)
        if reverse and keep_order:
            outputs = jax.tree.map(
                lambda y: flip_sequences(y, lengths, num_batch, time_major), outputs
            )
        return (carry, outputs) if return_carry else outputs

    def _scan(
        self, carry: Any, inputs: jax.Array, is_valid: jax.Array | None, axis: int
    ) -> tuple[Any, Any]:
        """Runs the cell; returns the carry after the last valid step, and outputs."""
        cell, state_axes = self.cell, self.state_axes
        if self.broadcast_rngs is not None:
            # No refs: their counts would go on from step to step.
            with var_defaults(ref=False):
                cell = model_streams.split_rngs(
                    cell,
                    splits=1,
                    squeeze=True,
                    only=self.broadcast_rngs,
                    graph=True,
                    graph_updates=False,
                )
            constant = filters.All(RngState, self.broadcast_rngs)
            state_axes = StateAxes({constant: None, **state_axes})
        carry = _in_dtypes_of_steps(cell, carry, inputs, axis, state_axes)
        scan = loops.scan(
            _step,
            in_axes=(state_axes, Carry, (axis, 0)),
            out_axes=(Carry, axis),
            unroll=self.unroll,
            graph=True,
            graph_updates=True,
        )
        valid = None if is_valid is None else carry
        (last, valid), outputs = scan(cell, (carry, valid), (inputs, is_valid))
        return (last if is_valid is None else valid), outputs


def _streams(network: Module, rngs: Any) -> list[Any]:
    """Lists the streams that a call draws from: those passed to it, and its own."""
    stream = rngs.carry if isinstance(rngs, Rngs) else rngs
    streams = model_streams.streams_in(network, graph=True)
    return [stream, *[x for _, x in streams]]


def _new_stream(rngs: Rngs | RngStream | bool) -> RngStream | None:
    """A network's stream for the keys of the first carry; ``True``: a constant seed."""
    if isinstance(rngs, bool):
        return RngStream(0, tag="carry") if rngs else None
    return rngs.carry.fork() if isinstance(rngs, Rngs) else rngs.fork()


def _num_batch_axes(cell: Any, shape: tuple[int, ...], time_major: bool) -> int:
    num_batch = len(shape) - cell.num_feature_axes - 1
    if num_batch < 0:
        axes = "time, *batch" if time_major else "*batch, time"
        raise ValueError(
            f"nnx.RNN expects inputs [{axes}, *features], with "
            f"{cell.num_feature_axes} axes of features for a {type(cell).__name__}."
        )
    return num_batch


def _checked_lengths(seq_lengths: Any, batch: tuple[int, ...]) -> jax.Array | None:
    if seq_lengths is None:
        return None
    lengths = jnp.asarray(seq_lengths)
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(f"seq_lengths must be integers, got {lengths.dtype}.")
    return jnp.broadcast_to(lengths.astype(int), batch)


def _step(cell: Any, carry: Any, inputs: Any) -> tuple[Any, Any]:
    """One step: of the cell, and of the carry after the last valid step."""
    (state, valid), (x, is_valid) = carry, inputs
    new_state, outputs = cell(state, x)
    new_state = _in_dtypes_of(state, new_state, type(cell).__name__)
    if is_valid is not None:
        valid = jax.tree.map(functools.partial(_select, is_valid), new_state, valid)
    return (new_state, valid), outputs


def _in_dtypes_of(state: Any, new_state: Any, cell: str) -> Any:
    """Casts a new carry to the dtypes of the old one, if they have one structure."""
    leaves, treedef = jax.tree.flatten(state)
    new_leaves, new_treedef = jax.tree.flatten(new_state)
    if treedef != new_treedef:
        return new_state  # JAX refuses it
    dtypes = [*map(jnp.result_type, leaves)]
    for old, new in zip(dtypes, map(jnp.result_type, new_leaves), strict=True):
        if arithmetic.wide_dtype(old, new) != old:  # code of the user computes in it
            raise TypeError(
                f"nnx.RNN: a step of the {cell} turns a carry of {old} into one of "
                f"{new}, but a loop needs one dtype.\n"
                f"Start with a carry of {new}, through initial_carry or the cell's "
                f"initialize_carry; or return the carry as {old}."
            )
    return treedef.unflatten(map(jnp.asarray, new_leaves, dtypes))


def _in_dtypes_of_steps(
    cell: Any, carry: Any, inputs: jax.Array, axis: int, state_axes: StateAxes
) -> Any:
    """A first carry in dtypes that also hold what a step makes of it.

    A loop carries the same dtypes from step to step, but a carry in half precision may
    meet inputs or parameters in float32.
    """
    if len(_dtypes_in(cell, carry, inputs)) == 1:
        return carry
    graphdef, leaves = flattening.flatten_graph(cell)
    values = [flattening.raw_of(leaf) for leaf in leaves]
    values = [x[...] if _jax.is_ref(x) else x for x in values]
    cell_axes = [
        _axis_of(path, leaf, state_axes)
        for path, leaf in zip(graphdef.paths(), leaves, strict=True)
    ]

    def step(values: Any, carry: Any, inputs: jax.Array) -> Any:
        values = [*map(_first_along, values, cell_axes)]
        copied = flattening.unflatten(graphdef, values)
        return copied(carry, _first_along(inputs, axis))[0]

    try:
        while True:
            with methods.unobserved():
                states = jax.eval_shape(step, values, carry, inputs)
            wide = jax.tree.map(_widened, carry, states)
            if jax.tree.map(jnp.result_type, wide) == jax.tree.map(
                jnp.result_type, carry
            ):
                return carry
            carry = wide
    except Exception:
        return carry  # the loop raises the same error, with the path of the cell


def _dtypes_in(cell: Any, carry: Any, inputs: jax.Array) -> set[Any]:
    """Collects the dtypes that meet in a step."""
    dtypes = {inputs.dtype, *map(jnp.result_type, jax.tree.leaves(carry))}
    try:
        return {*dtypes, compute_dtypes.compute_dtype(cell)}
    except ValueError:  # a cell without parameters
        return dtypes


def _axis_of(path: Any, leaf: Any, state_axes: StateAxes) -> Any:
    """Finds the axis along which each step gets a slice of a leaf of the cell."""
    for filter_, axis in state_axes.items():
        if filters.to_predicate(filter_)(path, leaf):
            return axis if isinstance(axis, int) else None
    return None


def _first_along(x: jax.Array, axis: int | None) -> jax.Array:
    """Takes the first slice along an axis; zeros of its shape if there is none."""
    if axis is None:
        return x
    if x.shape[axis] == 0:
        return jnp.zeros(x.shape[:axis] + x.shape[axis + 1 :], x.dtype)
    return jax.lax.index_in_dim(x, 0, axis, keepdims=False)


def _widened(x: Any, other: Any) -> Any:
    """An array in the dtype that holds both."""
    dtype = arithmetic.wide_dtype(jnp.result_type(x), jnp.result_type(other))
    return x if jnp.result_type(x) == dtype else jnp.asarray(x, dtype)


def _select(is_valid: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    shape = is_valid.shape + (1,) * (new.ndim - is_valid.ndim)
    return jnp.where(is_valid.reshape(shape), new, old)


def flip_sequences(
    inputs: Num[Array, "*shape"],
    seq_lengths: Integer[Array, "*batch"] | None,
    num_batch_dims: int,
    time_major: bool,
) -> Num[Array, "*shape"]:
    """Reverses sequences in time; padding stays at the end.

    Args:
        inputs: ``[*batch, time, *features]``, or ``[time, *batch, *features]``.
        seq_lengths: The length of each sequence without padding, ``[*batch]``;
            ``None``: nothing is padding.
        num_batch_dims: The number of batch axes.
        time_major: Whether time is the first axis.

    Returns:
        A new array of the same shape; the padding is reversed too.

    Example:
        >>> from graftree.nn.recurrent import flip_sequences
        >>> x = jnp.array([[1, 2, 3, 0, 0]])
        >>> flip_sequences(x, jnp.array([3]), num_batch_dims=1, time_major=False)
        Array([[3, 2, 1, 0, 0]], dtype=int32)
    """
    axis = 0 if time_major else num_batch_dims
    if seq_lengths is None:
        return jnp.flip(inputs, axis)
    rank, num_steps = inputs.ndim, inputs.shape[axis]
    others = [n for n in range(rank) if n != axis]
    steps = jnp.expand_dims(jnp.arange(num_steps), others)
    lengths = jnp.expand_dims(seq_lengths, (axis, *range(num_batch_dims + 1, rank)))
    return jnp.take_along_axis(inputs, (lengths - 1 - steps) % num_steps, axis)


def _concatenate(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.concatenate([a, b], axis=-1)


class Bidirectional(Module):
    """Processes sequences in both directions, and merges the outputs step by step.

    Args:
        forward_rnn: The network that begins with the first step.
        backward_rnn: The network that begins with the last step.
        merge_fn: A function of the outputs of both for the same steps; the default
            joins their last axes.
        time_major: Whether inputs and outputs are ``[time, *batch, *features]``, not
            ``[*batch, time, *features]``.
        return_carry: Whether to return the last carries too.
        rngs: Where the keys of the first carries come from: ``True`` for a stream with
            a constant seed; an Rngs, whose stream ``carry`` is forked; an RngStream,
            which is kept; ``False``: from the streams of the two networks.

    Attributes:
        rngs: An RngStream that both use, or ``None``.

    Raises:
        TypeError: If ``rngs`` is something else.
        AttributeError: If it lacks the stream ``carry``.

    Example:
        >>> rngs = nnx.Rngs(0)
        >>> forward, backward = [nnx.RNN(nnx.GRUCell(2, 3, rngs=rngs)) for _ in "fb"]
        >>> nnx.Bidirectional(forward, backward)(jnp.ones((4, 5, 2))).shape
        (4, 5, 6)

    References:
        Schuster and Paliwal, 1997, "Bidirectional Recurrent Neural Networks".
    """

    merge_fn: Callable[[jax.Array, jax.Array], jax.Array] = _concatenate
    time_major: bool = False
    return_carry: bool = False

    def __init__(
        self,
        forward_rnn: RNNBase,
        backward_rnn: RNNBase,
        *,
        merge_fn: Callable[[jax.Array, jax.Array], jax.Array] = _concatenate,
        time_major: bool = False,
        return_carry: bool = False,
        rngs: Rngs | RngStream | bool = True,
    ):
        self.forward_rnn = forward_rnn
        self.backward_rnn = backward_rnn
        self.merge_fn = merge_fn
        self.time_major = time_major
        self.return_carry = return_carry
        if not isinstance(rngs, Rngs | RngStream | bool):
            raise TypeError(
                "rngs must be a Rngs, a RngStream or a bool in nnx.Bidirectional, got "
                f"{type(rngs)}."
            )
        self.rngs = rngs if isinstance(rngs, RngStream) else _new_stream(rngs)
        if forward_rnn is backward_rnn:
            # The logger that programs for Flax listen to.
            logging.getLogger("absl").warning(
                "forward_rnn and backward_rnn of nnx.Bidirectional are the same object:"
                " both directions share their parameters."
            )

    def __call__(
        self,
        inputs: Num[ArrayLike, "*shape"],
        *,
        initial_carry: tuple[Any, Any] | None = None,
        rngs: Rngs | RngStream | None = None,
        seq_lengths: Integer[ArrayLike, "*batch"] | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
    ) -> Any:
        """Processes a batch of sequences.

        Args:
            inputs: ``[*batch, time, *features]``, or ``[time, *batch, *features]``.
            initial_carry: The first carries, forward and backward; ``None``: the cells
                make them.
            rngs: Gives the keys of the first carries, forward first: an Rngs from its
                stream ``carry``, or an RngStream. ``None``: its own stream.
            seq_lengths: How many steps each sequence has, ``[*batch]``; ``None``: all.
            return_carry: Overrides the attribute, if not ``None``.
            time_major: Overrides the attribute, if not ``None``.
            reverse: No effect; accepted for symmetry with `RNN`.
            keep_order: No effect; accepted for symmetry with `RNN`.

        Returns:
            The merged outputs; or a tuple of the carries, ``(forward, backward)``, and
            the outputs.

        Raises:
            ValueError: If ``initial_carry`` is not a pair; and as for `RNN`.
            TypeError: As for `RNN`.
        """
        return_carry = self.return_carry if return_carry is None else return_carry
        time_major = self.time_major if time_major is None else time_major
        options = {
            "rngs": arguments.stream(self, rngs, "carry"),
            "seq_lengths": seq_lengths,
            "return_carry": True,
            "time_major": time_major,
        }
        first, last = _pair(initial_carry)
        with arguments.undone_on_failure(*_streams(self, rngs)):
            first, forward = self.forward_rnn(
                inputs, initial_carry=first, reverse=False, **options
            )
            last, backward = self.backward_rnn(
                inputs, initial_carry=last, reverse=True, keep_order=True, **options
            )
            outputs = jax.tree.map(self.merge_fn, forward, backward)
        return ((first, last), outputs) if return_carry else outputs


def _pair(initial_carry: Any) -> tuple[Any, Any]:
    if initial_carry is None:
        return None, None
    if isinstance(initial_carry, tuple | list) and len(initial_carry) == 2:
        return tuple(initial_carry)
    raise ValueError(
        "initial_carry must be a pair of the forward and the backward carry, got "
        f"{jax.tree.structure(initial_carry)}."
    )


class StackedRNN(Module):
    """Several recurrent layers: each processes the outputs of the one before.

    Args:
        cell_type: Makes the cells, as ``cell_type(in_features, hidden_features,
            rngs=rngs)``: a class such as `LSTMCell`, or a ``functools.partial`` of one.
        in_features: The features of the inputs.
        hidden_features: The features of each layer, in each direction.
        num_layers: How many layers there are.
        bidirectional: Whether the layers are `Bidirectional`. Each then gives
            ``2 * hidden_features``, those of the forward direction first.
        dropout_rate: The rate of `Dropout` between layers; the last one has none.
        rngs: Gives the keys of the parameters and of the dropout.

    Attributes:
        layers: A List of `RNN` or `Bidirectional`.
        dropout: The Dropout.
        rngs: An RngStream, with a constant seed, for the first carries of all layers.

    Raises:
        ValueError: If ``num_layers`` is less than 1, or the rate is out of range.

    Example:
        >>> rnn = nnx.StackedRNN(
        ...     nnx.LSTMCell, 2, 3, num_layers=2, bidirectional=True, rngs=nnx.Rngs(0)
        ... )
        >>> carries, outputs = rnn(jnp.ones((4, 5, 2)), return_carry=True)
        >>> outputs.shape, len(carries)
        ((4, 5, 6), 2)
    """

    def __init__(
        self,
        cell_type: Callable[..., RNNCellBase],
        in_features: int,
        hidden_features: int,
        *,
        num_layers: int,
        bidirectional: bool = False,
        dropout_rate: float = 0.0,
        rngs: Rngs,
    ):
        if num_layers < 1:
            raise ValueError(f"StackedRNN expects num_layers >= 1, got {num_layers}.")
        num_directions = 2 if bidirectional else 1
        layers = []
        for _ in range(num_layers):
            networks = [
                RNN(cell_type(in_features, hidden_features, rngs=rngs))
                for _ in range(num_directions)
            ]
            layers.append(Bidirectional(*networks) if bidirectional else networks[0])
            in_features = num_directions * hidden_features
        self.layers = List(layers)
        self.dropout = Dropout(dropout_rate, rngs=rngs if dropout_rate else None)
        self.rngs = _new_stream(True)

    def __call__(
        self,
        inputs: Num[ArrayLike, "*shape"],
        *,
        initial_carry: Sequence[Any] | None = None,
        seq_lengths: Integer[ArrayLike, "*batch"] | None = None,
        return_carry: bool = False,
        time_major: bool = False,
        rngs: Rngs | RngStream | None = None,
    ) -> Any:
        """Processes a batch of sequences.

        Args:
            inputs: ``[*batch, time, features]``, or ``[time, *batch, features]``.
            initial_carry: The first carry of each layer, a pair for a layer with two
                directions. ``None``: the cells make them.
            seq_lengths: How many steps each sequence has, ``[*batch]``; ``None``: all.
            return_carry: Whether to return the last carries too.
            time_major: Whether time is the first axis of inputs and outputs.
            rngs: Gives the keys of the first carries: an Rngs from its stream
                ``carry``, or an RngStream. ``None``: its own stream.

        Returns:
            The outputs of the last layer; or a tuple of the carries of all layers, as a
            tuple, and the outputs.

        Raises:
            ValueError: If there is not one ``initial_carry`` for each layer; and as for
                `RNN`.
            TypeError: As for `RNN`.
        """
        count = len(self.layers)
        first = (None,) * count if initial_carry is None else initial_carry
        if not isinstance(first, tuple | list) or len(first) != count:
            raise ValueError(
                f"initial_carry must have the carries of {count} layers, got "
                f"{jax.tree.structure(initial_carry)}."
            )
        stream = arguments.stream(self, rngs, "carry")
        carries, outputs = [], jnp.asarray(inputs)
        for layer, carry in zip(self.layers, first, strict=True):
            if carries:
                outputs = self.dropout(outputs)
            carry, outputs = layer(
                outputs,
                initial_carry=carry,
                seq_lengths=seq_lengths,
                return_carry=True,
                time_major=time_major,
                rngs=stream,
            )
            carries.append(carry)
        return (tuple(carries), outputs) if return_carry else outputs
