"""Variable types of one's own are filters, and have names."""

import jax.numpy as jnp
from flax import nnx


class Cache(nnx.Variable):
    pass


class Net(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))
        self.c = Cache(jnp.zeros(2), tag="mine")


graphdef, caches, rest = nnx.split(Net(), Cache, ...)
print(list(caches), list(rest), caches["c"].tag)
print(nnx.variable_name_from_type(Cache, allow_register=True))
nnx.register_variable_name("my_kind", type("Kind", (nnx.Variable,), {}))
print(nnx.variable_type_from_name("my_kind").__name__)
