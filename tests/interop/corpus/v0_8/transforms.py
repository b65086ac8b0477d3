"""Transforms of Modules, control flow over them, and random streams."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx


class Counter(nnx.Module):
    def __init__(self):
        self.n = nnx.Variable(jnp.array(0))


def up(counter):
    counter.n.value += 1  # deprecated


def down(counter):
    counter.n.value -= 1  # deprecated


def body(carry):
    counter, i = carry
    counter.n.value += i  # deprecated
    return counter, i + 1


counter = Counter()
nnx.cond(jnp.array(True), up, down, counter)
nnx.switch(jnp.array(0), [up, down], counter)
counter, i = nnx.while_loop(lambda c: c[1] < 4, body, (counter, jnp.array(0)))
counter = nnx.fori_loop(0, 3, lambda i, c: (up(c), c)[1], counter)
print(counter.n.value, i)  # deprecated


@nnx.jit
def grow(counter):
    up(counter)
    counter.extra = nnx.Param(jnp.ones(2))
    counter.name = "seen"


@partial(nnx.jit, static_argnums=(1,))
def power(counter, exponent):
    return counter.n**exponent


grow(counter)
print(counter.n.value, counter.extra.value, counter.name)  # deprecated
print(power(counter, 2), power(counter, 3))


# An ensemble by `split_rngs` and `vmap`, and `scan` over the same layers.
@nnx.split_rngs(splits=3)
@nnx.vmap(in_axes=(0,), out_axes=0)
def create(rngs):
    return nnx.Linear(2, 2, rngs=rngs)


@nnx.vmap(in_axes=(0, None), out_axes=0)
def apply(model, x):
    return model(x)


@nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
def forward(x, layer):
    return nnx.tanh(layer(x))


layers, x = create(nnx.Rngs(0)), jnp.ones((1, 2))
y = apply(layers, x)
print(layers.kernel.value.shape, y.shape, bool((y[0] == y[1]).all()))  # deprecated
print(forward(x, layers).round(3))

# `StateAxes` maps parts of a model over different axes.
axes = nnx.StateAxes({nnx.Param: 0, nnx.BatchStat: None})
net = nnx.Dict(w=nnx.Param(jnp.arange(3.0)), m=nnx.BatchStat(jnp.array(10.0)))
scale = nnx.vmap(lambda net, x: net.w * x + net.m, in_axes=(axes, None))
print(scale(net, 2.0), list(axes.values()), len(axes.filters))

# Keywords of the time before are errors.
for call in (
    lambda: nnx.vmap(lambda m: m, state_axes={...: 0}),
    lambda: nnx.scan(lambda m: m, variable_axes={nnx.Param: 0}),
    lambda: nnx.grad(lambda m: m, wrt=nnx.Param),
):
    try:
        call()
    except TypeError as error:
        print("unexpected keyword" in str(error))
print([hasattr(nnx, name) for name in ("Vmap", "Scan", "Remat", "GraphNode")])

rngs = nnx.Rngs(0, dropout=1)
first, second = rngs.params(), rngs.params()
counts = rngs.params.count.value, rngs.dropout.count.value  # deprecated
print((first == second).all(), counts)
print(jax.random.key_data(rngs.noise()), "noise" in rngs)
print(sorted(nnx.state(rngs)), rngs.dropout.key.value.dtype)  # deprecated
