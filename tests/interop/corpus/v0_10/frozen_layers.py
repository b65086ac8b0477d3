"""Part of a model is frozen: `DiffState` with a filter of paths."""

import jax.numpy as jnp
import optax
from flax import nnx

net = nnx.Dict(
    body=nnx.Linear(2, 2, rngs=nnx.Rngs(0)), head=nnx.Linear(2, 1, rngs=nnx.Rngs(1))
)
head = nnx.All(nnx.Param, nnx.PathContains("head"))
optimizer = nnx.Optimizer(net, optax.sgd(0.1), wrt=head)


@nnx.jit
def step(net, optimizer, x):
    def loss(net):
        return (net.head(net.body(x)) ** 2).mean()

    value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, head))(net)
    optimizer.update(net, grads)
    return value, grads


first, grads = step(net, optimizer, jnp.ones((4, 2)))
last, _ = step(net, optimizer, jnp.ones((4, 2)))
print(sorted(grads), bool(last < first))
