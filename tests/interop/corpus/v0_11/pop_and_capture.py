"""`nnx.capture` in place of `pop`."""

import jax.numpy as jnp
from flax import nnx


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 2, rngs=rngs)

    def __call__(self, x):
        self.sow(nnx.Intermediate, "x", x)
        return self.linear(x)


forward = nnx.capture(Net(nnx.Rngs(0)), nnx.Intermediate)
y, sown = forward(jnp.ones((1, 2)))
print(sown["x"].get_value()[0], y.shape)
