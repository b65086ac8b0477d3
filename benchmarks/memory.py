"""How much memory a donated train step needs at its peak, over the size of its state.

At the peak there is what Python holds when a step begins, and what XLA allocates for
the step: its temporaries, and those outputs that don't take the place of a donated
input. Both are exact, on every backend: the first is the sum over the arrays alive, the
second is in the plan of the compiled program. A library that holds the arrays of the
step before, or whose outputs don't meet their donated inputs, has a second copy of the
state in one of the two, and so a figure larger by one.
"""

import gc
from collections.abc import Callable
from typing import Any

import jax

from benchmarks import perceptrons, steps
from benchmarks.gauges import Operation

DEPTH = 4
WIDTH = 256


def raw() -> Operation:
    """The peak of plain JAX."""
    return peak(
        lambda: steps.raw(
            perceptrons.loss,
            perceptrons.parameters(DEPTH, WIDTH),
            perceptrons.batch(WIDTH),
            donate=True,
        )
    )


def nnx(nnx: Any, **mode: bool) -> Operation:
    """The peak of Graftree or Flax NNX, in one of the three modes."""
    return peak(
        lambda: steps.nnx(
            nnx,
            perceptrons.nnx_loss,
            perceptrons.nnx_model(nnx, DEPTH, WIDTH),
            perceptrons.batch(WIDTH),
            donate=True,
            **mode,
        )
    )


def peak(make: Callable[[], steps.Step]) -> Operation:
    """Trains a few times with a new step and gives the peak, in states."""

    def operation():
        before = _live_bytes()
        step = make()
        for _ in range(3):
            step()
        held = _live_bytes() - before
        plan = step.lower().compile().memory_analysis()
        outputs = plan.output_size_in_bytes - plan.alias_size_in_bytes
        return (held + outputs + plan.temp_size_in_bytes) / _state_bytes()

    return operation


def _live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def _state_bytes() -> int:
    params = perceptrons.parameters(DEPTH, WIDTH)
    state = (params, steps.ADAM.init(params))
    return sum(array.nbytes for array in jax.tree.leaves(state))
