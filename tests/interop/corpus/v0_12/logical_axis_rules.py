"""Logical names by rules."""

import jax
import jax.numpy as jnp
from flax import nnx

mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
with jax.set_mesh(mesh), nnx.logical_axis_rules([("batch", "data")]):
    v = nnx.Param(jnp.ones((2, 2)), out_sharding=("batch", None))
    print(nnx.get_partition_spec(v).get_value())
print(v.out_sharding, v.get_value().sharding.spec)
w = nnx.Param(
    jnp.ones(2), out_sharding=("b",), sharding_rules=(("b", "data"),), mesh=mesh
)
print(w.get_value().sharding.spec)
