"""What a call of plain ``jax.jit`` with objects takes: it flattens them each time."""

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import perceptrons
from benchmarks.gauges import Operation


def raw_dict(count: int) -> Operation:
    """A function of a dict of arrays that computes nothing."""
    return _ignoring({i: jnp.ones(2) for i in range(count)})


def nnx_state(nnx: Any, count: int) -> Operation:
    """The same of a State of Variables, for Graftree or Flax NNX."""
    return _ignoring(
        nnx.State({i: nnx.Param(jnp.ones(2)) for i in range(count)}),
    )


def _ignoring(tree: Any) -> Operation:
    function = jax.jit(lambda tree: 0.0)
    return lambda: function(tree)


def raw_call(depth: int) -> Operation:
    """Forward call of the MLP, whose parameters are a list of dicts."""
    return _calling(perceptrons.apply, perceptrons.parameters(depth))


def nnx_call(nnx: Any, depth: int) -> Operation:
    """Forward call of an object, for Graftree or Flax NNX."""
    return _calling(lambda model, x: model(x), perceptrons.nnx_model(nnx, depth))


def equinox_call(equinox: Any, depth: int) -> Operation:
    """Forward call of an Equinox module, whose leaves are arrays only."""
    model = perceptrons.equinox_model(equinox, depth)
    return _calling(lambda model, x: model(x), model)


def _calling(call: Any, model: Any) -> Operation:
    function, x = jax.jit(call), perceptrons.batch()["x"]
    return lambda: function(model, x)
