"""Arrays as attributes, beside Variables."""

import jax.numpy as jnp
from flax import nnx


class Net(nnx.Module):
    def __init__(self):
        self.scale = jnp.array(2.0)
        self.w = nnx.Param(jnp.array(3.0))


@nnx.jit
def f(net):
    net.scale = net.scale * 2
    return net.scale * net.w


net = Net()
print(f(net), net.scale, sorted(nnx.state(net)))
