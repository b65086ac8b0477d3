"""Gradients, custom rules, a scan, and the error of a write in a trace."""

import flax
import jax
import jax.numpy as jnp
from flax import nnx
from flax.errors import TraceContextError


class Net(nnx.Module):
    def __init__(self):
        self.x = nnx.Param(jnp.array(1.0))
        self.y = nnx.Param(jnp.array(2.0))
        self.n = nnx.BatchStat(jnp.array(0.0))


def loss(net, x):
    return net.y**2 * x + net.n, {"aux": net.n.value}  # deprecated


params = nnx.DiffState(0, nnx.Param)
grads, aux = nnx.grad(loss, argnums=params, has_aux=True)(Net(), 5.0)
print(grads["y"].value, aux["aux"], list(grads))  # deprecated
values, grads = nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(Net(), 5.0)
print(values[0], grads[1], grads[0]["x"].value)  # deprecated


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


axes = nnx.StateAxes({...: nnx.Carry})


@nnx.remat
@nnx.scan(in_axes=(axes, nnx.Carry, 0), out_axes=(nnx.Carry, 0))
def run(net, total, x):
    net.n.value += 1  # deprecated
    return total + x, total * x


net = Net()
total, products = run(net, 0.0, jnp.arange(4.0))
print(total, products, net.n.value)  # deprecated


@jax.jit
def write():
    net.n.value += 1  # deprecated


try:
    write()
except TraceContextError as error:
    text = str(error)
    print("different trace level" in text, isinstance(error, flax.errors.FlaxError))
