"""`model.train()` and `model.eval()` switch Dropout and BatchNorm."""

import jax.numpy as jnp
from flax import nnx


class Net(nnx.Module):
    def __init__(self, rngs):
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.drop(x))


net = Net(nnx.Rngs(0, dropout=1))
x = jnp.arange(8.0).reshape(2, 4)
net.train()
net(x)
print(
    net.drop.deterministic,
    net.norm.use_running_average,
    net.norm.mean.value,  # deprecated
)
net.eval()
print(net.drop.deterministic, jnp.allclose(net(x), net(x)))
net.set_attributes(nnx.Dropout, rate=0.1)
print(net.drop.rate)
