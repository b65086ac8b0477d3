"""Annotations called `sharding`, with a rule for logical names."""

import jax.numpy as jnp
from flax import nnx

nnx.use_eager_sharding(False)
v = nnx.Param(jnp.ones((2, 2)), sharding=("a", None))  # deprecated
print(v.out_sharding, nnx.get_partition_spec({"v": v})["v"].value)  # deprecated
init = nnx.with_partitioning(nnx.initializers.ones_init(), sharding=(None, "b"))
layer = nnx.Linear(2, 2, kernel_init=init, rngs=nnx.Rngs(0))
print(nnx.get_partition_spec(nnx.state(layer))["kernel"].value)  # deprecated
