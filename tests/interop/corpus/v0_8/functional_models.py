"""A model as a skeleton and a State, in pure functions."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx


class MLP(nnx.Module):
    def __init__(self, din, dmid, dout, *, rngs: nnx.Rngs):
        self.first = nnx.Linear(din, dmid, rngs=rngs)
        self.second = nnx.Linear(dmid, dout, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


graphdef, params = nnx.split(MLP(2, 2, 2, rngs=nnx.Rngs(0)), nnx.Param)
x = jnp.linspace(-1, 1, 16).reshape(8, 2)


# A GraphDef is hashable: a static argument of `jax.jit`.
@partial(jax.jit, static_argnums=0)
def step(graphdef, params):
    def loss(params):
        return jnp.mean((nnx.merge(graphdef, params)(x) - x**2) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


for _ in range(20):
    value, params = step(graphdef, params)
print(f"{value:.4f}", isinstance(params, nnx.State), isinstance(graphdef, nnx.GraphDef))
print(nnx.graphdef(MLP(2, 2, 2, rngs=nnx.Rngs(1))) == graphdef)


class Counter(nnx.Module):
    def __init__(self):
        self.count = nnx.Variable(jnp.array(0))

    def __call__(self, step):
        self.count.value += step  # deprecated
        return self.count.value  # deprecated


# `GraphDef.apply` calls a method and returns the new state.
graphdef, state = nnx.split(Counter())
y, (graphdef, state) = graphdef.apply(state)(3)
y, (graphdef, state) = graphdef.apply(state)(4)
print(y, state["count"].value, state.count.value)  # deprecated
