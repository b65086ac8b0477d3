"""Tagged parameters: freeze by filter, decay by mask."""

import jax.numpy as jnp
import optax
from flax import nnx


class Frozen(nnx.Param):
    pass


class Net(nnx.Module):
    def __init__(self):
        self.a = nnx.Param(jnp.ones(2))
        self.b = Frozen(jnp.ones(2))


trainable = nnx.All(nnx.Param, nnx.Not(Frozen))
net = Net()
optimizer = nnx.Optimizer(net, optax.sgd(1.0), wrt=trainable)
grads = nnx.grad(lambda n: (n.a * n.b).sum(), argnums=nnx.DiffState(0, trainable))(net)
optimizer.update(net, grads)
print(net.a[...], net.b[...])
