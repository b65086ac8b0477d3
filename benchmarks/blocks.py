"""Blocks with batch statistics and dropout: what a step changes beside parameters.

The function of raw JAX does the same mathematics on the same numbers, down to the key
of each dropout: that of its stream, folded with the number of times it was used.

Such blocks do other things in training than in evaluation, so ``train()`` and
``eval()`` change static attributes of all of them. The functions of raw JAX are two,
and nothing is switched.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import perceptrons, steps
from benchmarks.gauges import Operation
from benchmarks.groups import Made
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
def _block_class(nnx: Any) -> type:
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.norm = nnx.BatchNorm(
                WIDTH, momentum=MOMENTUM, epsilon=EPSILON, rngs=rngs
            )
            self.dropout = nnx.Dropout(RATE, rngs=rngs)

        def __call__(self, x):
            return self.dropout(nnx.relu(self.norm(self.linear(x))))

    return Block


def nnx_model(nnx: Any, depth: int) -> Any:
    """The blocks as an object, with the values of `parameters` and `states`."""
    model = perceptrons.chain(nnx)(_block_class(nnx), depth, nnx.Rngs(0))
    for block, values, state in zip(
        model.layers, parameters(depth), states(depth), strict=True
    ):
        block.linear.kernel[...] = values["kernel"]
        block.dropout.rngs.key[...] = state["key"]
    return model


# ------------------------------------------------------------------------- train steps


def raw(depth: int) -> steps.Step:
    """One step of Adam in plain JAX."""
    params, batch = parameters(depth), perceptrons.batch()
    return steps.raw(loss, params, batch, state=states(depth))


def nnx(nnx: Any, depth: int, **mode: bool) -> steps.Step:
    """The same on an object of Graftree or Flax NNX."""
    return _step(nnx, nnx_model(nnx, depth), **mode)


def _step(nnx: Any, model: Any, **mode: bool) -> steps.Step:
    loss, batch = perceptrons.nnx_loss, perceptrons.batch()
    return steps.nnx(nnx, loss, model, batch, has_state=True, **mode)


# -------------------------------------------- a train step and an evaluation in turns


def _raw_in_turns(depth: int) -> Operation:
    """Both functions take the same values."""
    step, batch = raw(depth), perceptrons.batch()
    params = parameters(depth)
    _, treedef = jax.tree.flatten((params, steps.ADAM.init(params), states(depth)))

    @jax.jit
    def evaluate(leaves, x, y):
        params, _, state = jax.tree.unflatten(treedef, leaves)
        return evaluated(params, state, x, y)

    def operation():
        step()
        return evaluate(step.objects["leaves"], *batch.values())

    return operation


def _in_turns(nnx: Any, depth: int, **mode: bool) -> Operation:
    """One model, switched before each, for Graftree or Flax NNX."""
    model, batch = nnx_model(nnx, depth), perceptrons.batch()
    step, evaluate = _step(nnx, model, **mode), nnx.jit(perceptrons.nnx_loss, **mode)

    def operation():
        model.train()
        step()
        model.eval()
        return evaluate(model, *batch.values())

    return operation


def nnx_view(nnx: Any, depth: int) -> Operation:
    """A view of the model is evaluated, and nothing is switched."""
    model, batch = nnx_model(nnx, depth), perceptrons.batch()
    view = nnx.view(model, deterministic=True, use_running_average=True)
    step, evaluate = _step(nnx, model), nnx.jit(perceptrons.nnx_loss)

    def operation():
        step()
        return evaluate(view, *batch.values())

    return operation


IN_TURNS = Made(_raw_in_turns, _in_turns)
