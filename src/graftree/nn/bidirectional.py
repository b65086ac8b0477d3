"""Recurrent networks that read sequences in both directions."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from graftree.core.modules.modules import Module
from graftree.core.rng.streams import Rngs, RngStream
from graftree.nn import recurrent

if TYPE_CHECKING:
    from jaxtyping import Array, Int, Num


def _concatenate(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.concatenate([a, b], axis=-1)


class Bidirectional(Module):
    """Processes sequences in both directions, and merges the outputs step by step.

    Args:
        forward_rnn: The network that begins with the first step.
        backward_rnn: The one that begins with the last step.
        merge_fn: A function of the outputs of both for the same steps; the default
            joins their last axes.
        time_major: Whether inputs and outputs are ``[time, *batch, *features]``, not
            ``[*batch, time, *features]``.
        return_carry: Whether the last carries are returned, too.
        rngs: Where the keys of the first carries come from: ``True`` for a stream with
            a constant seed; an Rngs, whose stream ``carry`` is forked; an RngStream,
            which is kept; ``False``: from those of the two networks.

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

    forward_rnn: recurrent.RNNBase
    backward_rnn: recurrent.RNNBase
    merge_fn: Callable[[jax.Array, jax.Array], jax.Array] = _concatenate
    time_major: bool = False
    return_carry: bool = False

    def __init__(
        self,
        forward_rnn: recurrent.RNNBase,
        backward_rnn: recurrent.RNNBase,
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
        self.rngs = rngs if isinstance(rngs, RngStream) else recurrent.new_stream(rngs)
        if forward_rnn is backward_rnn:
            # The logger that programs for Flax listen to.
            logging.getLogger("absl").warning(
                "forward_rnn and backward_rnn of nnx.Bidirectional are the same object:"
                " both directions share their parameters."
            )

    def __call__(
        self,
        inputs: Num[Array, "*shape"],
        *,
        initial_carry: tuple[Any, Any] | None = None,
        rngs: Rngs | RngStream | None = None,
        seq_lengths: Int[Array, "*batch"] | None = None,
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
                stream ``carry``, or an RngStream. ``None``: the own stream.
            seq_lengths: How many steps each sequence has, ``[*batch]``; ``None``: all.
            return_carry: Overrides the attribute, if not ``None``.
            time_major: Overrides the attribute, if not ``None``.
            reverse: Without effect; here for symmetry with `RNN`.
            keep_order: Without effect; here for symmetry with `RNN`.

        Returns:
            The merged outputs; or a tuple of the carries, ``(forward, backward)``, and
            the outputs.

        Raises:
            ValueError: If ``initial_carry`` is no pair; and as `RNN`.
            TypeError: As `RNN`.
        """
        return_carry = self.return_carry if return_carry is None else return_carry
        time_major = self.time_major if time_major is None else time_major
        stream = self.rngs if rngs is None else rngs
        options = {
            "rngs": stream.carry if isinstance(stream, Rngs) else stream,
            "seq_lengths": seq_lengths,
            "return_carry": True,
            "time_major": time_major,
        }
        first, last = _pair(initial_carry)
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
        "initial_carry of nnx.Bidirectional must be a pair, of the forward and the "
        f"backward carry, got {jax.tree.structure(initial_carry)}."
    )
