"""`nnx.state` and `nnx.split` by several filters."""

import jax.numpy as jnp
from flax import nnx

net = nnx.Sequential(
    nnx.Linear(1, 2, rngs=nnx.Rngs(0)), nnx.BatchNorm(2, rngs=nnx.Rngs(0))
)
params, stats = nnx.state(net, nnx.Param, nnx.BatchStat)
print(len(nnx.to_flat_state(params)), len(nnx.to_flat_state(stats)))
try:
    nnx.split(net, nnx.Param)
except ValueError as error:
    print("Non-exhaustive filters" in str(error))
graphdef, params, rest = nnx.split(net, nnx.Param, ...)
print(nnx.merge(graphdef, rest, params)(jnp.ones((2, 1))).shape)
