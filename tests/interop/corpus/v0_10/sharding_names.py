"""`sharding_names` on a Variable, and read back."""

import jax.numpy as jnp
from flax import nnx

nnx.use_eager_sharding(False)
v = nnx.Param(jnp.ones((2, 2)), sharding_names=("a", "b"))  # deprecated
print(v.sharding_names)  # deprecated
v.set_metadata(sharding=("b", None))  # deprecated
print(v.out_sharding, v.has_metadata("sharding"))
