"""Transforms that JAX doesn't compile, called outside of a trace with the same objects.

JAX runs the function at each call, and so does each library. What may differ is what it
takes to bring the objects in and out, and how long a layer takes under the transform.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import perceptrons
from benchmarks.gauges import Operation

DEPTH = 4
STEPS = 3

NAMES = ("value_and_grad", "vmap", "scan")


def _apply(params: Any, x: jax.Array) -> jax.Array:
    for kernel, bias in params:
        x = x @ kernel + bias
    return x


def _operation(name: str, module: Any, call: Any, model: Any, **mode: bool) -> Any:
    """The transform of a library, over a function of its model and the inputs."""
    x = perceptrons.batch()["x"]

    def loss(model, x):
        return jnp.sum(call(model, x) ** 2)

    if name == "value_and_grad":
        return partial(module.value_and_grad(loss, **mode), model, x)
    mapped = module.vmap(loss, in_axes=(None, 0), **mode)
    return partial(mapped, model, jnp.stack([x] * STEPS))


def raw(name: str) -> Operation:
    """The same by hand, over a list of pairs of arrays."""
    # A bias of the rank of the outputs: nothing is computed that a layer doesn't.
    params = [
        (layer["kernel"], layer["bias"][None])
        for layer in perceptrons.parameters(DEPTH)
    ]
    if name != "scan":
        return _operation(name, jax, _apply, params)

    def body(x, _):
        return _apply(params, x), 0.0

    x = perceptrons.batch()["x"]
    return partial(jax.lax.scan, body, x, jnp.arange(STEPS))


def nnx(nnx: Any, name: str, **mode: bool) -> Operation:
    """The transform of Graftree or Flax NNX, over an object with linear layers."""
    make = partial(nnx.Linear, perceptrons.WIDTH, perceptrons.WIDTH)
    model = perceptrons.chain(nnx)(lambda rngs: make(rngs=rngs), DEPTH, nnx.Rngs(0))
    if name != "scan":
        return _operation(name, nnx, lambda model, x: model(x), model, **mode)

    def body(x, model, _):
        return model(x), 0.0

    axes = {"in_axes": (nnx.Carry, None, 0), "out_axes": (nnx.Carry, 0)}
    scanned = nnx.scan(body, **axes, **mode)
    return partial(scanned, perceptrons.batch()["x"], model, jnp.arange(STEPS))
