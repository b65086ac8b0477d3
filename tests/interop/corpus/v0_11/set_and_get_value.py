"""`get_value` and `set_value` of pytrees."""

import jax.numpy as jnp
from flax import nnx

v = nnx.Variable({"a": jnp.ones(2), "b": 3})
print(v.get_value()["b"], v["a"])
v.set_value({"a": jnp.zeros(2), "b": 4})
print(v["b"])
