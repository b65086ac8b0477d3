"""`nnx.jit` with static arguments, through `functools.partial`."""

from functools import partial

import jax.numpy as jnp
from flax import nnx


@partial(nnx.jit, static_argnums=(1,))
def f(model, power):
    return model.bias**power


model = nnx.Linear(1, 2, rngs=nnx.Rngs(0))
model.bias.value = jnp.array([2.0, 3.0])  # deprecated
print(f(model, 2), f(model, 3))
