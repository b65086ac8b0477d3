"""Making the MLP, with random parameters: eagerly, as one makes a model.

Raw JAX draws the same kernels with the same initializer; Equinox draws its own.
"""

from typing import Any

import jax

from benchmarks import perceptrons
from benchmarks.gauges import Operation
from benchmarks.perceptrons import WIDTH


def raw(depth: int) -> Operation:
    """The arrays alone."""
    return lambda: perceptrons.parameters(depth)


def nnx(nnx: Any, depth: int) -> Operation:
    """The object, for Graftree or Flax NNX."""
    make = perceptrons.nnx_class(nnx)
    return lambda: make(depth, WIDTH, rngs=nnx.Rngs(0))


def equinox(equinox: Any, depth: int) -> Operation:
    """The Equinox module."""
    make = perceptrons.equinox_class(equinox)
    return lambda: make(depth, WIDTH, key=jax.random.key(0))
