"""`Variable(..., use_ref=True)`.

Not in Flax today.
"""

import jax
import jax.numpy as jnp
from flax import nnx

count = nnx.Variable(jnp.array(0), use_ref=True)


@jax.jit
def up(count):
    count[...] += 1


up(count)
print(count.has_ref, count[...])
