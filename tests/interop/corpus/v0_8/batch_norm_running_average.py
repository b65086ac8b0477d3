"""BatchNorm with `use_running_average` as an argument of the call."""

import jax.numpy as jnp
from flax import nnx

norm = nnx.BatchNorm(2, momentum=0.9, use_running_average=False, rngs=nnx.Rngs(0))
x = jnp.array([[1.0, 2.0], [3.0, 6.0]])
print(norm(x).round(3), norm.mean.value, norm.var.value)  # deprecated
print(norm(x, use_running_average=True).round(3))
graphdef, params, stats = nnx.split(norm, nnx.Param, nnx.BatchStat)
print(sorted(params), sorted(stats))
