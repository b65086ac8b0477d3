"""`Variable(..., is_hijax=True)` and `use_hijax`, as in 0.12.1.

Not in Flax today.
"""

import jax
import jax.numpy as jnp
from flax import nnx

v = nnx.Variable(jnp.array(0), is_hijax=True)


@jax.jit
def up(v):
    v[...] = v[...] + 1


up(v)
print(v[...], v.is_hijax, v.has_ref)
with nnx.use_hijax(True):
    print(nnx.using_hijax(), nnx.Variable(jnp.array(0)).is_hijax)
