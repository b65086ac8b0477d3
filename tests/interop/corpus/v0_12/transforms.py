"""Transforms: modes by keywords, contexts and `compat`, options of `jit`, a stack."""

import jax
import jax.numpy as jnp
from flax import nnx

net = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
x = jnp.ones((1, 1))


@nnx.jit(graph=False)
def up(net):
    net.bias[...] += 1


@nnx.jit(graph_updates=False)
def twice(net):
    net.bias[...] *= 2


@nnx.jit(static_argnames=("n",), donate_argnames=("net",))
def add(net, n):
    net.bias[...] += n
    return net.bias[...] * 1


up(net)
twice(net)
print(net.bias[...])
grads = nnx.grad(lambda n: n(x).sum(), graph_updates=False)(net)
print(type(grads).__name__, grads.bias[...])
print(add(net, n=2), net.bias[...])
compiled = nnx.jit(lambda m, x: m(x)).lower(net, x).compile()
print(compiled(net, x).shape)
g = nnx.jit_partial(lambda m, x: m(x), net, graph_updates=False)
print(g(jnp.ones((2, 1))).shape)


class Tied(nnx.Module):
    def __init__(self):
        self.a = nnx.Param(jnp.ones(1))
        self.b = self.a


@nnx.compat.jit
def grow(net):
    net.c = nnx.Param(net.a[...] + 1)


# Tree mode: objects are pytrees, and aliases are errors, but for `nnx.compat`.
net = Tied()
with nnx.set_graph_mode(False):
    try:
        nnx.split(net)
    except ValueError as error:
        print("does not support shared references" in str(error))
    grow(net)
    graphdef, state = nnx.compat.split(net)
print(net.c[...], sorted(state))
print(len(nnx.to_flat_state(nnx.state(net))), nnx.set_graph_mode.current_value())
with nnx.set_graph_updates(False):
    print(nnx.set_graph_updates.current_value())


@nnx.vmap(in_axes=0, out_axes=0)
def create(rngs):
    return nnx.Linear(2, 2, rngs=rngs)


stack = create(nnx.Rngs(0).split(3))
y, _ = jax.lax.scan(lambda x, layer: (layer(x), None), jnp.ones((1, 2)), stack)
print(y.round(3))


@nnx.jit
def attend(x):
    attention = nnx.MultiHeadAttention(
        num_heads=2, in_features=4, rngs=nnx.Rngs(0), decode=False, normalize_qk=True
    )
    y = attention(x, mask=nnx.make_causal_mask(x[..., 0]))
    return y, attention(x, x, x) - attention(x)


y, difference = attend(jnp.ones((1, 3, 4)))
print(y.shape, jnp.abs(difference).max() < 1e-6)
