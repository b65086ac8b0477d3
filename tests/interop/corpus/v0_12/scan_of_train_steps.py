"""A whole epoch as one `scan` over batches."""

import jax.numpy as jnp
import optax
from flax import nnx

net = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(net, optax.sgd(0.1), wrt=nnx.Param)
xs = jnp.linspace(-1, 1, 32).reshape(8, 4, 1)


@nnx.jit
@nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
def epoch(carry, x):
    net, optimizer = carry
    loss, grads = nnx.value_and_grad(lambda n: jnp.mean((n(x) - 2 * x) ** 2))(net)
    optimizer.update(net, grads)
    return (net, optimizer), loss


_, losses = epoch((net, optimizer), xs)
print(losses.shape, bool(losses[-1] < losses[0]), optimizer.step[...])
