"""`nnx.jit` updates the caller's objects, also their structure."""

import jax.numpy as jnp
from flax import nnx


class Net(nnx.Module):
    def __init__(self):
        self.count = nnx.Variable(jnp.array(0))


@nnx.jit
def f(net):
    net.count.value += 1  # deprecated
    net.extra = nnx.Param(jnp.ones(2))
    net.name = "seen"


net = Net()
f(net)
print(net.count.value, net.extra.value, net.name)  # deprecated
