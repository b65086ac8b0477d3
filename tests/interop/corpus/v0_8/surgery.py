"""Layers are replaced, shared and iterated."""

import jax.numpy as jnp
from flax import nnx


class Net(nnx.Module):
    def __init__(self, rngs):
        self.a = nnx.Linear(2, 2, rngs=rngs)
        self.b = nnx.Linear(2, 2, rngs=rngs)


net = Net(nnx.Rngs(0))
net.b = net.a
print(len(nnx.state(net).flat_state()), net.a is net.b)  # deprecated
for path, module in net.iter_modules():  # deprecated
    print(path, type(module).__name__)
net.a = nnx.LoRALinear(2, 2, lora_rank=1, rngs=nnx.Rngs(1))
net.b.kernel = nnx.Param(jnp.zeros((2, 2)))
print(sorted("/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(net))))
