"""`sow` into the module, and `pop` the intermediates."""

import jax.numpy as jnp
from flax import nnx


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 2, rngs=rngs)

    def __call__(self, x):
        y = self.linear(x)
        self.sow(nnx.Intermediate, "y", y)  # deprecated
        return y


net = Net(nnx.Rngs(0))
net(jnp.ones((1, 2)))
net(jnp.zeros((1, 2)))
sown = nnx.pop(net, nnx.Intermediate)
print(len(sown["y"].value), sown["y"].value[1], hasattr(net, "y"))  # deprecated
