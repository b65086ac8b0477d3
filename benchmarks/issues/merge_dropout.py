"""Dropout after merge under jax.grad: the random stream belongs to another trace."""

import jax
import jax.numpy as jnp
from flax import nnx

x = jnp.ones((2, 8))
linear, dropout = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1))
model = nnx.Sequential(linear, dropout)
graphdef, params, rest = nnx.split(model, nnx.Param, ...)


def loss(params, rest, **options):
    model = nnx.merge(graphdef, params, rest, **options)
    return jnp.sum(model(x) ** 2)


try:
    jax.grad(loss)(params, rest)
except Exception as error:
    print("merge shares Variables, jax.grad raises:", type(error).__name__)
    print("the error says what to do:", "copy=True" in str(error))
grads = jax.grad(lambda params: loss(params, rest, copy=True))(params)
expected = nnx.grad(lambda model: jnp.sum(model(x) ** 2))(model)
pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True)
error = max(jnp.abs(one - other).max() for one, other in pairs)
print("merge copies them, difference from nnx.grad:", error)
