"""`out_sharding` metadata, and the older names of it."""

import jax.numpy as jnp
from flax import nnx

with nnx.use_eager_sharding(False):
    v = nnx.Param(jnp.ones((2, 2)), out_sharding=("a", None))
    old = nnx.Param(jnp.ones((2, 2)), sharding=("a", None))  # deprecated
print(v.out_sharding == old.out_sharding, nnx.using_eager_sharding())
print(nnx.get_partition_spec(v).get_value(), v.get_metadata("out_sharding"))
print(v.has_metadata("eager_sharding"), v.get_metadata("nothing", 3))
