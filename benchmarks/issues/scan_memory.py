"""Scan over layers: memory for copies of the parameters."""

import jax
import jax.numpy as jnp
from flax import nnx


class Stack(nnx.Module):
    def __init__(self, depth, width, rngs):
        make = nnx.vmap(lambda key: nnx.Linear(width, width, rngs=nnx.Rngs(key)))
        self.layers = make(jax.random.split(rngs.params(), depth))

    def __call__(self, x):
        axes = {"in_axes": (nnx.Carry, 0), "out_axes": nnx.Carry}
        return nnx.scan(lambda x, layer: layer(x), **axes)(x, self.layers)


def memory(function, model):
    plan = function.lower(model, x).compile().memory_analysis()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    return (plan.output_size_in_bytes + plan.temp_size_in_bytes) / size


def repeat(state, x):
    model = nnx.merge(graphdef, state)
    return jax.lax.scan(lambda x, _: (model(x), None), x, length=50)[0]


x, stack = jnp.ones((1, 64)), Stack(8, 64, nnx.Rngs(0))
graphdef, state = nnx.split(stack)
forward = nnx.jit(lambda stack, x: stack(x))
print(f"outputs and temporaries of a pass: {memory(forward, stack):.2f} x parameters")
print(f"of 50 passes in a scan: {memory(jax.jit(repeat), state):.2f} x parameters")
