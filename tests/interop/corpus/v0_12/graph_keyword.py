"""`graph=False` and `graph_updates=False` per transform."""

import jax.numpy as jnp
from flax import nnx

net = nnx.Linear(1, 1, rngs=nnx.Rngs(0))


@nnx.jit(graph=False)
def up(net):
    net.bias[...] += 1


@nnx.jit(graph_updates=False)
def twice(net):
    net.bias[...] *= 2


up(net)
twice(net)
print(net.bias[...])
grads = nnx.grad(lambda n: n(jnp.ones((1, 1))).sum(), graph_updates=False)(net)
print(type(grads).__name__, grads.bias[...])
