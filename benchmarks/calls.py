"""One forward call of the MLP under jit, in each library."""

from typing import Any

import jax

from benchmarks import perceptrons
from benchmarks.gauges import Operation


def raw(depth: int) -> Operation:
    """Forward call in plain JAX: ``jax.jit`` on a flat list of arrays."""
    leaves, treedef = jax.tree.flatten(perceptrons.parameters(depth))
    x = perceptrons.batch()["x"]

    @jax.jit
    def function(leaves, x):
        return perceptrons.apply(jax.tree.unflatten(treedef, leaves), x)

    return lambda: function(leaves, x)


def nnx(nnx: Any, depth: int, **mode: bool) -> Operation:
    """Forward call of an object, for Graftree or Flax NNX, in one of three modes."""
    model = perceptrons.nnx_model(nnx, depth)
    return _call(nnx.jit(lambda model, x: model(x), **mode), model)


def equinox(equinox: Any, depth: int) -> Operation:
    """Forward call of an Equinox module."""
    model = perceptrons.equinox_model(equinox, depth)
    return _call(equinox.filter_jit(lambda model, x: model(x)), model)


def _call(function: Any, model: Any) -> Operation:
    x = perceptrons.batch()["x"]
    return lambda: function(model, x)
