"""`custom_vjp` over a Module."""

import jax.numpy as jnp
from flax import nnx


class Net(nnx.Module):
    def __init__(self):
        self.x = nnx.Param(jnp.array(1.0))
        self.y = nnx.Param(jnp.array(2.0))


@nnx.custom_vjp
def f(net):
    return jnp.sin(net.x) * net.y


def forward(net):
    return f(net), (jnp.cos(net.x.value), jnp.sin(net.x.value), net)  # deprecated


def backward(residuals, g):
    updates, out = g
    cos, sin, net = residuals
    tangent = nnx.state(net)
    tangent["x"].value = cos * out * net.y  # deprecated
    tangent["y"].value = sin * out  # deprecated
    return (tangent,)


f.defvjp(forward, backward)
grads = nnx.grad(f, argnums=nnx.DiffState(0, ...))(Net())
print(f"{grads['x'].value:.4f} {grads['y'].value:.4f}")  # deprecated
