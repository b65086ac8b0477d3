"""`perturb` adds a Perturbation to the module."""

import jax.numpy as jnp
from flax import nnx


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 2, rngs=rngs)

    def __call__(self, x):
        return self.perturb("before", self.linear(x)).sum()  # deprecated


net = Net(nnx.Rngs(0))
net(jnp.ones((1, 2)))
grads = nnx.grad(
    lambda net: net(jnp.ones((1, 2))), argnums=nnx.DiffState(0, nnx.Perturbation)
)(net)
print(grads["before"].value)  # deprecated
