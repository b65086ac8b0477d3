"""States are joined by `|` and taken apart by `-`."""

import jax.numpy as jnp
from flax import nnx

a = nnx.State({"x": nnx.Param(jnp.array(1.0)), "y": nnx.Param(jnp.array(2.0))})
b = nnx.State({"y": nnx.Param(jnp.array(5.0))})
print(sorted(a | b), (a | b)["y"].value)  # deprecated
print(sorted(a - b))  # deprecated
