"""Modules are pytrees; objects derive from Pytree."""

import jax
import jax.numpy as jnp
from flax import nnx


class Box(nnx.Pytree):
    def __init__(self):
        self.a = nnx.data(jnp.ones(2))
        self.b = nnx.static((1, 2))


box = Box()
print(len(jax.tree.leaves(box)), jax.tree.map(lambda x: x * 3, box).a, box.b)
model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
print(jax.jit(lambda m, x: m(x))(model, jnp.ones((1, 2))).shape)
print(nnx.Object is not None, issubclass(nnx.Module, nnx.Pytree))
