"""Transforms that JAX doesn't compile, called outside of a trace with the same objects.

JAX runs the function at each call, and so does each library. What may differ is what it
takes to bring the objects in and out, and how long a layer takes under the transform.
"""

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import perceptrons
from benchmarks.gauges import Operation

DEPTH = 4
STEPS = 3

NAMES = ("value_and_grad", "vmap", "scan")


def raw(name: str) -> Operation:
    """The same by hand, over a list of pairs of arrays."""
    # A bias of the rank of the outputs: nothing is computed that a layer doesn't.
    params = [
        (layer["kernel"], layer["bias"][None])
        for layer in perceptrons.parameters(DEPTH)
    ]
    x = perceptrons.batch()["x"]

    def apply(params, x):
        for kernel, bias in params:
            x = x @ kernel + bias
        return x

    def loss(params, x):
        return jnp.sum(apply(params, x) ** 2)

    if name == "value_and_grad":
        differentiated = jax.value_and_grad(loss)
        return lambda: differentiated(params, x)
    if name == "vmap":
        xs = jnp.stack([x] * STEPS)
        mapped = jax.vmap(loss, in_axes=(None, 0))
        return lambda: mapped(params, xs)
    steps = jnp.arange(STEPS)

    def body(x, _):
        return apply(params, x), 0.0

    return lambda: jax.lax.scan(body, x, steps)


def nnx(nnx: Any, name: str, **mode: bool) -> Operation:
    """The transform of Graftree or Flax NNX, over an object with linear layers."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            width = perceptrons.WIDTH
            self.layers = nnx.List(
                [nnx.Linear(width, width, rngs=rngs) for _ in range(DEPTH)]
            )

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    def loss(model, x):
        return jnp.sum(model(x) ** 2)

    def body(x, model, _):
        return model(x), 0.0

    model, x = Model(nnx.Rngs(0)), perceptrons.batch()["x"]
    if name == "value_and_grad":
        differentiated = nnx.value_and_grad(loss, **mode)
        return lambda: differentiated(model, x)
    if name == "vmap":
        xs = jnp.stack([x] * STEPS)
        mapped = nnx.vmap(loss, in_axes=(None, 0), **mode)
        return lambda: mapped(model, xs)
    axes, steps = (nnx.Carry, None, 0), jnp.arange(STEPS)
    scanned = nnx.scan(body, in_axes=axes, out_axes=(nnx.Carry, 0), **mode)
    return lambda: scanned(x, model, steps)
