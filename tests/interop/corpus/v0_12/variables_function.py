"""`nnx.variables` and `nnx.state`."""

import jax.numpy as jnp
from flax import nnx


class Net(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(1))
        self.scale = jnp.array(2.0)


print(sorted(nnx.variables(Net())), sorted(nnx.state(Net())))
print(sorted(nnx.variables(Net(), nnx.Param)))
