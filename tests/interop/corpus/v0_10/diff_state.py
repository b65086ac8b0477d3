"""`DiffState` chooses what is differentiated."""

import jax.numpy as jnp
from flax import nnx


class Net(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.array(2.0))
        self.s = nnx.BatchStat(jnp.array(3.0))


def loss(net, x):
    return net.w**2 * x + net.s, {"aux": net.s.value}  # deprecated


grads, aux = nnx.grad(loss, argnums=nnx.DiffState(0, nnx.Param), has_aux=True)(
    Net(), 5.0
)
print(grads["w"].value, aux["aux"], list(grads))  # deprecated
values, grads = nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(Net(), 5.0)
print(values[0], grads[1])
