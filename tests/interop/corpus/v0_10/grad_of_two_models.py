"""Gradients of two models, and auxiliary outputs."""

import jax.numpy as jnp
from flax import nnx

a, b = nnx.Linear(1, 1, rngs=nnx.Rngs(0)), nnx.Linear(1, 1, rngs=nnx.Rngs(1))
x = jnp.ones((1, 1))
grads = nnx.grad(lambda a, b: (b(a(x))).sum(), argnums=(0, 1))(a, b)
print([g["bias"].value for g in grads][1], len(grads))  # deprecated
(value, aux), grads = nnx.value_and_grad(
    lambda a: (a(x).sum() * 0, {"k": 3}), has_aux=True
)(a)
print(value, aux, grads["kernel"].value)  # deprecated
