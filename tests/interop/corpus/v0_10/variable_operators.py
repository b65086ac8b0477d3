"""Variables are used like their arrays."""

import jax.numpy as jnp
from flax import nnx

a, b = nnx.Param(jnp.arange(3.0)), nnx.Param(jnp.ones(3))
print(a + b, 2 * a, a @ b, -a, a[1:], a.sum(), a.shape, abs(-b), a % 2)
a[1] = 7.0
a[...] += 1
print(a.value, jnp.mean(a), a.T.shape, len(a))  # deprecated
