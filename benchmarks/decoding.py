"""One step of autoregressive decoding with a cache, in each library.

What a step gives is what the next one takes. Each layer writes the key and the value of
the new token into its cache and attends to what is there. Parameters stay; caches and
their index change at each call. At the end of the cache the index starts again, so that
a step can be called for ever.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import perceptrons
from benchmarks.gauges import Operation
from benchmarks.perceptrons import BATCH, WIDTH

LENGTH = 16


def parameters(depth: int) -> list[dict[str, dict[str, jax.Array]]]:
    """The projections of the layers, without biases."""
    inputs = perceptrons.parameters(depth, 3 * WIDTH)
    outputs = perceptrons.parameters(depth)
    return [
        {
            "project": {"kernel": into["kernel"][:WIDTH]},
            "out": {"kernel": out["kernel"]},
        }
        for into, out in zip(inputs, outputs, strict=True)
    ]


def cache() -> dict[str, jax.Array]:
    """The empty cache of one layer."""
    return {
        "keys": jnp.zeros((BATCH, LENGTH, WIDTH)),
        "values": jnp.zeros((BATCH, LENGTH, WIDTH)),
        "index": jnp.zeros((), jnp.int32),
    }


def attend(projected: jax.Array, cache: dict[str, jax.Array]) -> Any:
    """What a new token sees, and the cache with it."""
    query, key, value = jnp.split(projected, 3, axis=-1)
    index = cache["index"]
    write = functools.partial(jax.lax.dynamic_update_index_in_dim, index=index, axis=1)
    keys, values = write(cache["keys"], key), write(cache["values"], value)
    scores = jnp.einsum("bd,bld->bl", query, keys) / jnp.sqrt(WIDTH)
    seen = (jnp.arange(LENGTH) <= index)[None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    seen_values = jnp.einsum("bl,bld->bd", weights, values)
    cache = {"keys": keys, "values": values, "index": (index + 1) % LENGTH}
    return seen_values, cache


def raw(depth: int) -> Operation:
    """Decode step in plain JAX, on flat lists of parameters and of caches."""
    params, params_def = jax.tree.flatten(parameters(depth))
    caches, caches_def = jax.tree.flatten([cache() for _ in range(depth)])
    x = perceptrons.batch()["x"]

    @jax.jit
    def function(params, caches, x):
        changed, layers = [], jax.tree.unflatten(params_def, params)
        caches = jax.tree.unflatten(caches_def, caches)
        for layer, before in zip(layers, caches, strict=True):
            seen, after = attend(x @ layer["project"]["kernel"], before)
            x = x + seen @ layer["out"]["kernel"]
            changed.append(after)
        return jax.tree.leaves(changed), jnp.tanh(x)

    def operation():
        nonlocal caches, x
        caches, x = function(params, caches, x)
        return x

    return operation


@functools.cache
def _layer_class(nnx: Any) -> type:
    class Layer(nnx.Module):
        def __init__(self, rngs):
            linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
            self.project = linear(WIDTH, 3 * WIDTH)
            self.out = linear(WIDTH, WIDTH)
            for name, value in cache().items():
                setattr(self, name, nnx.Cache(value))

        def __call__(self, x):
            variables = {name: getattr(self, name) for name in cache()}
            before = {name: variable[...] for name, variable in variables.items()}
            seen, after = attend(self.project(x), before)
            for name, variable in variables.items():
                variable[...] = after[name]
            return x + self.out(seen)

    return Layer


def nnx(nnx: Any, depth: int, **mode: bool) -> Operation:
    """Decode step on an object, for Graftree or Flax NNX, in one of the three modes."""
    model = perceptrons.chain(nnx)(_layer_class(nnx), depth, nnx.Rngs(0))
    nnx.update(model, {"layers": dict(enumerate(parameters(depth)))})
    x = perceptrons.batch()["x"]
    function = nnx.jit(lambda model, x: jnp.tanh(model(x)), **mode)

    def operation():
        nonlocal x
        x = function(model, x)
        return x

    return operation
