"""Shared Variables are found, and kept shared."""

import jax.numpy as jnp
from flax import nnx


class Net(nnx.Module):
    def __init__(self):
        self.a = nnx.Param(jnp.ones(1))
        self.b = nnx.Param(jnp.zeros(1))
        self.c = self.a


net = Net()
print(nnx.find_duplicates(net))
graphdef, state = nnx.split(net)
merged = nnx.merge(graphdef, state)
print(sorted(state), merged.a is merged.c)
