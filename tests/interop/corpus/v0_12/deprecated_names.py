"""`nnx.deprecations.deprecated` and old attributes of objects."""

import jax.numpy as jnp
from flax import nnx

old = nnx.deprecations.deprecated(nnx.state)
print(sorted(old(nnx.Linear(1, 1, rngs=nnx.Rngs(0)))))  # deprecated
net = nnx.Dict(a=nnx.Param(jnp.ones(1)))
print("a" in net._pytree__nodes, "a" in net._object__nodes)  # deprecated
print(net._object__state is not None)  # deprecated
