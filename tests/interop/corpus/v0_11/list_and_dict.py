"""`nnx.List` and `nnx.Dict` hold layers."""

import jax.numpy as jnp
from flax import nnx


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(3)])
        self.heads = nnx.Dict(
            a=nnx.Linear(2, 1, rngs=rngs), b=nnx.Linear(2, 1, rngs=rngs)
        )

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return {name: head(x) for name, head in self.heads.items()}


net = Net(nnx.Rngs(0))
net.layers.append(nnx.Linear(2, 2, rngs=nnx.Rngs(1)))
print(len(net.layers), sorted(net(jnp.ones((1, 2)))), net.heads.a is net.heads["a"])
print(sorted(nnx.state(net)["layers"]))
