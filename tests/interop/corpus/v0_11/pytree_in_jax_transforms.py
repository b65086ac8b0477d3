"""Modules go through JAX's own transforms."""

import jax
import jax.numpy as jnp
from flax import nnx

net = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
grads = jax.grad(lambda net: net(jnp.ones((1, 2))).sum())(net)
print(type(grads).__name__, grads.kernel[...].shape)
net = jax.tree.map(lambda p, g: p - 0.1 * g, net, grads)
print(net.bias[...], jax.vmap(net)(jnp.ones((3, 1, 2))).shape)
stack = jax.vmap(lambda key: nnx.Linear(2, 2, rngs=nnx.Rngs(key)))(
    jax.random.split(jax.random.key(0), 3)
)
print(stack.kernel[...].shape)
