"""`variable[...]` reads and writes the whole value."""

import jax.numpy as jnp
from flax import nnx

v = nnx.Param(jnp.zeros((2, 3)))
v[...] = 5.0
v[0] = jnp.arange(3.0)
v[...] += 1
print(v[...], v[0, 1], v.get_value().sum())
v.set_value(jnp.ones(2))
print(v[...].shape)
