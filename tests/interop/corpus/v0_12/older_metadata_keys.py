"""`set_metadata` with older keys, in each of its forms."""

import jax.numpy as jnp
from flax import nnx

nnx.use_eager_sharding(False)
v = nnx.Param(jnp.ones((2, 2)))
v.set_metadata(sharding=("a", None))  # deprecated
print(v.out_sharding)
v.set_metadata("sharding_names", ("b", None))  # deprecated
print(v.out_sharding, v.has_metadata("sharding_names"))
nnx.set_metadata(nnx.Dict(v=v), sharding=("c", None))  # deprecated
print(v.out_sharding)
