"""Positions and keywords of the optimizer."""

import jax.numpy as jnp
import optax
from flax import nnx

net = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(net, tx=optax.sgd(0.1), wrt=nnx.Param)
grads = nnx.grad(lambda n: n(jnp.ones((1, 1))).sum())(net)
updates = optimizer.update(model=net, grads=grads)
print(updates["bias"], optimizer.step[...])
try:
    nnx.Optimizer(net, optax.sgd(0.1), nnx.Param)
except TypeError as error:
    print("wrt" in str(error))
