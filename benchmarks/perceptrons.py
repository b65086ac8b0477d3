"""The small MLP that most operations are about, on the same numbers in each library.

The layers are 8 wide, so that next to nothing is computed and what remains is the cost
of the call.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

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
def nnx_class(nnx: Any) -> type:
    """The class of the MLP, for Graftree or Flax NNX, whichever ``nnx`` is."""

    class MLP(nnx.Module):
        def __init__(self, depth, width, *, rngs):
            self.layers = nnx.List(
                [nnx.Linear(width, width, rngs=rngs) for _ in range(depth)]
            )

        def __call__(self, x):
            for layer in self.layers:
                x = nnx.relu(layer(x))
            return x

    return MLP


def nnx_model(nnx: Any, depth: int, width: int = WIDTH) -> Any:
    """The MLP as an object, with the values of `parameters`."""
    model = nnx_class(nnx)(depth, width, rngs=nnx.Rngs(0))
    for layer, values in zip(model.layers, parameters(depth, width), strict=True):
        layer.kernel[...], layer.bias[...] = values["kernel"], values["bias"]
    return model


def nnx_loss(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """The loss of an object that is called."""
    return squared_error(model(x), y)


# ---------------------------------------------------------------------------- Equinox


@functools.cache
def equinox_class(equinox: Any) -> type:
    """The class of the MLP, for Equinox."""

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


def equinox_model(equinox: Any, depth: int, width: int = WIDTH) -> Any:
    """The MLP as a value, with the values of `parameters`."""

    def arrays_of(model):
        return [a for layer in model.layers for a in (layer.weight, layer.bias)]

    model = equinox_class(equinox)(depth, width, key=jax.random.key(0))
    values = parameters(depth, width)
    arrays = [a for layer in values for a in (layer["kernel"].T, layer["bias"])]
    return equinox.tree_at(arrays_of, model, arrays)
