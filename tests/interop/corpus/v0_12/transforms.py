"""Transforms: modes by keywords, contexts and `compat`, options of `jit`, a stack."""

import jax
import jax.numpy as jnp
from flax import nnx

net = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
x = jnp.ones((1, 1))


@nnx.jit(graph=False)
def up(net):
    net.bias[...] += 1


@nnx.jit(static_argnames=("n",), donate_argnames=("net",), graph_updates=False)
def add(net, n):
    net.bias[...] += n
    return net.bias[...] * 1


up(net)
print(add(net, n=2), net.bias[...])
grads = nnx.grad(lambda n: n(x).sum(), graph_updates=False)(net)
print(type(grads).__name__, grads.bias[...])
compiled = nnx.jit(lambda m, x: m(x)).lower(net, x).compile()
g = nnx.jit_partial(lambda m, x: m(x), net, graph_updates=False)
print(compiled(net, x).shape, g(jnp.ones((2, 1))).shape)


@nnx.compat.jit
def grow(net):
    net.c = nnx.Param(net.a[...] + 1)


# Tree mode: objects are pytrees, and aliases are errors, but for `nnx.compat`.
net = nnx.Dict(a=nnx.Param(jnp.ones(1)))
net.b = net.a
with nnx.set_graph_mode(False), nnx.set_graph_updates(False):
    try:
        nnx.split(net)
    except ValueError as error:
        print("does not support shared references" in str(error))
    grow(net)
    graphdef, state = nnx.compat.split(net)
    print(nnx.set_graph_mode.current_value(), nnx.set_graph_updates.current_value())
print(net.c[...], sorted(state))


@nnx.vmap(in_axes=0, out_axes=0)
def create(rngs):
    return nnx.Linear(2, 2, rngs=rngs)


stack = create(nnx.Rngs(0).split(3))
y, _ = jax.lax.scan(lambda x, layer: (layer(x), None), jnp.ones((1, 2)), stack)
print(y.round(3))
