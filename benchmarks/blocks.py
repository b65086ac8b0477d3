"""Blocks with batch statistics and dropout: what a step changes beside parameters.

The function of raw JAX does the same mathematics on the same numbers, down to the key
of each dropout: that of its stream, folded with the number of times it was used.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import perceptrons
from benchmarks.perceptrons import WIDTH

RATE = 0.1
MOMENTUM = 0.99
EPSILON = 1e-5


def parameters(depth: int) -> list[dict[str, jax.Array]]:
    """The parameters of the blocks, new arrays each time."""
    return [
        {**linear, "scale": jnp.ones(WIDTH), "shift": jnp.zeros(WIDTH)}
        for linear in perceptrons.parameters(depth)
    ]


def states(depth: int) -> list[dict[str, jax.Array]]:
    """What the blocks change when they are called."""
    return [
        {
            "mean": jnp.zeros(WIDTH),
            "var": jnp.ones(WIDTH),
            "key": key,
            "count": jnp.zeros((), jnp.uint32),
        }
        for key in jax.random.split(jax.random.key(1), depth)
    ]


# ---------------------------------------------------------------------------- raw JAX


def loss(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
    """The loss of the blocks, and their next state."""
    changed = []
    for values, before in zip(params, state, strict=True):
        x = x @ values["kernel"] + values["bias"][None]
        x, after = _normalize(values, before, x)
        x, after = _dropout(after, jax.nn.relu(x))
        changed.append(after)
    return perceptrons.squared_error(x, y), changed


def evaluated(params: Any, state: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """The loss of the blocks with the averages so far, without dropout."""
    for values, averages in zip(params, state, strict=True):
        x = x @ values["kernel"] + values["bias"][None]
        x = jax.nn.relu(_scaled(values, x, averages["mean"], averages["var"]))
    return perceptrons.squared_error(x, y)


def _normalize(values: Any, state: Any, x: jax.Array) -> Any:
    mean = jnp.mean(x, 0)
    var = jnp.maximum(jnp.mean(jnp.square(x), 0) - jnp.square(mean), 0)
    y = _scaled(values, x, mean, var)
    averages = {
        "mean": MOMENTUM * state["mean"] + (1 - MOMENTUM) * mean,
        "var": MOMENTUM * state["var"] + (1 - MOMENTUM) * var,
    }
    return y, state | averages


def _scaled(values: Any, x: jax.Array, mean: jax.Array, var: jax.Array) -> jax.Array:
    factor = jax.lax.rsqrt(var + EPSILON) * values["scale"]
    return (x - mean[None]) * factor[None] + values["shift"][None]


def _dropout(state: Any, x: jax.Array) -> Any:
    key = jax.random.fold_in(state["key"], state["count"])
    mask = jax.random.bernoulli(key, 1 - RATE, x.shape)
    y = jnp.where(mask, x / (1 - RATE), 0)
    return y, state | {"count": state["count"] + 1}


# ----------------------------------------------------------------- Graftree, Flax NNX


@functools.cache
def nnx_class(nnx: Any) -> type:
    """The class of the model, for Graftree or Flax NNX."""

    class Block(nnx.Module):
        def __init__(self, *, rngs):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.norm = nnx.BatchNorm(
                WIDTH, momentum=MOMENTUM, epsilon=EPSILON, rngs=rngs
            )
            self.dropout = nnx.Dropout(RATE, rngs=rngs)

        def __call__(self, x):
            return self.dropout(nnx.relu(self.norm(self.linear(x))))

    class Blocks(nnx.Module):
        def __init__(self, depth, *, rngs):
            self.blocks = nnx.List([Block(rngs=rngs) for _ in range(depth)])

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    return Blocks


def nnx_model(nnx: Any, depth: int) -> Any:
    """The blocks as an object, with the values of `parameters` and `states`."""
    model = nnx_class(nnx)(depth, rngs=nnx.Rngs(0))
    for block, values, state in zip(
        model.blocks, parameters(depth), states(depth), strict=True
    ):
        block.linear.kernel[...] = values["kernel"]
        block.dropout.rngs.key[...] = state["key"]
    return model
