"""`sow` inside `capture` leaves nothing in the module."""

import jax.numpy as jnp
from flax import nnx


class Net(nnx.Module):
    def __call__(self, x):
        self.sow(nnx.Intermediate, "x", x)
        return x


def captured(net):
    return nnx.capture(net, nnx.Intermediate)(jnp.ones(1))[1]["x"].get_value()


net = Net()
print(len(captured(net)), hasattr(net, "x"))
