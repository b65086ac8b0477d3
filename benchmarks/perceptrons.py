"""The small MLP that most operations are about, on the same numbers in each library.

The layers are 8 wide, so that next to nothing is computed and what remains is the cost
of the call.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import steps
from benchmarks.groups import Made

WIDTH = 8
BATCH = 4

Parameters = list[dict[str, jax.Array]]


def batch(width: int = WIDTH) -> dict[str, jax.Array]:
    """Inputs and targets."""
    x = jnp.linspace(-1, 1, BATCH * width).reshape(BATCH, width)
    return {"x": x, "y": jnp.zeros_like(x)}


def parameters(depth: int, width: int = WIDTH) -> Parameters:
    """The parameters of the MLP as a plain pytree, new arrays each time."""
    initializer = jax.nn.initializers.lecun_normal()
    return [
        {"kernel": initializer(key, (width, width)), "bias": jnp.zeros(width)}
        for key in jax.random.split(jax.random.key(0), depth)
    ]


def squared_error(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """What all train steps make smaller."""
    return jnp.mean((outputs - targets) ** 2)


# ---------------------------------------------------------------------------- raw JAX


def apply(params: Parameters, x: jax.Array) -> jax.Array:
    """The MLP as a function."""
    for layer in params:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"][None])
    return x


def loss(params: Parameters, state: Any, x: jax.Array, y: jax.Array) -> Any:
    """The loss of the parameters, and the state, which this model has none of."""
    return squared_error(apply(params, x), y), state


# ----------------------------------------------------------------- Graftree, Flax NNX


@functools.cache
def chain(nnx: Any, after: Callable[[Any], Any] = lambda x: x) -> type:
    """The class of layers that are called in a row, and ``after`` behind each.

    It takes what makes a layer, how many to make, and their Rngs.
    """

    class Chain(nnx.Module):
        def __init__(self, make, depth, rngs):
            self.layers = nnx.List([make(rngs) for _ in range(depth)])

        def __call__(self, x):
            for layer in self.layers:
                x = after(layer(x))
            return x

    return Chain


def nnx_new(nnx: Any, depth: int, width: int = WIDTH) -> Any:
    """The MLP as an object with random parameters, for Graftree or Flax NNX."""
    make = functools.partial(nnx.Linear, width, width)
    return chain(nnx, nnx.relu)(lambda rngs: make(rngs=rngs), depth, nnx.Rngs(0))


def nnx_model(nnx: Any, depth: int, width: int = WIDTH) -> Any:
    """The same with the values of `parameters`."""
    model = nnx_new(nnx, depth, width)
    nnx.update(model, {"layers": dict(enumerate(parameters(depth, width)))})
    return model


def nnx_loss(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """The loss of an object that is called."""
    return squared_error(model(x), y)


# ---------------------------------------------------------------------------- Equinox


@functools.cache
def _equinox_class(equinox: Any) -> type:

    class MLP(equinox.Module):
        layers: list

        def __init__(self, depth, width, *, key):
            self.layers = [
                equinox.nn.Linear(width, width, key=key)
                for key in jax.random.split(key, depth)
            ]

        def __call__(self, x):
            for layer in self.layers:
                x = jax.nn.relu(jax.vmap(layer)(x))
            return x

    return MLP


def equinox_new(equinox: Any, depth: int, width: int = WIDTH) -> Any:
    """The MLP as a value with random parameters."""
    return _equinox_class(equinox)(depth, width, key=jax.random.key(0))


def equinox_model(equinox: Any, depth: int, width: int = WIDTH) -> Any:
    """The same with the values of `parameters`."""

    def arrays_of(model):
        return [a for layer in model.layers for a in (layer.weight, layer.bias)]

    model = equinox_new(equinox, depth, width)
    values = parameters(depth, width)
    arrays = [a for layer in values for a in (layer["kernel"].T, layer["bias"])]
    return equinox.tree_at(arrays_of, model, arrays)


# ------------------------------------------------------------------------- train steps


def raw(depth: int, width: int = WIDTH, **options: Any) -> steps.Step:
    """One step of Adam in plain JAX."""
    return steps.raw(loss, parameters(depth, width), batch(width), **options)


def nnx(nnx: Any, depth: int, width: int = WIDTH, **options: Any) -> steps.Step:
    """The same on an object of Graftree or Flax NNX; takes a mode, too."""
    model = nnx_model(nnx, depth, width)
    return steps.nnx(nnx, nnx_loss, model, batch(width), **options)


def equinox(equinox: Any, depth: int, **options: Any) -> steps.Step:
    """The same on an Equinox module."""
    model = equinox_model(equinox, depth)
    return steps.equinox(equinox, nnx_loss, model, batch(), **options)


def _raw_in_place(depth: int) -> steps.Step:
    return steps.raw_refs(loss, parameters(depth), batch())


def _nnx_in_place(nnx: Any, depth: int) -> steps.Step:
    make = functools.partial(nnx_model, nnx, depth)
    return steps.nnx_refs(nnx, nnx_loss, make, batch())


IN_PLACE = Made(_raw_in_place, _nnx_in_place)
