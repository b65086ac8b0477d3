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


@jax.jit
def step(params):
    def loss(params):
        return jnp.mean((nnx.merge(graphdef, params)(x) - x**2) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


for _ in range(20):
    value, params = step(params)
print(f"{value:.4f}", isinstance(params, nnx.State), isinstance(graphdef, nnx.GraphDef))


# A GraphDef is hashable: a static argument of `jax.jit`.
@partial(jax.jit, static_argnums=0)
def forward(graphdef, state, x):
    return nnx.merge(graphdef, state)(x)


print(forward(graphdef, params, x).shape)
other = nnx.graphdef(MLP(2, 2, 2, rngs=nnx.Rngs(1)))
print(hash(other) == hash(graphdef), other == graphdef)
print(nnx.graphdef(nnx.Linear(2, 2, rngs=nnx.Rngs(1))) == graphdef)

# Abstract models are made by `eval_shape`, and filled by `merge`.
abstract = nnx.eval_shape(lambda: MLP(2, 2, 2, rngs=nnx.Rngs(0)))
graphdef, state = nnx.split(abstract)
print(state["first"]["kernel"].value)  # deprecated
filled = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), state)
print(nnx.merge(graphdef, filled)(x[:2]))


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
print(y, state["count"].value)  # deprecated
assert state.count.value == 7  # deprecated
