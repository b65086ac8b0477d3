"""replace, copy_from, copy, get_metadata, raw values."""

import jax.numpy as jnp
from flax import nnx

v = nnx.Param(jnp.ones(2), tag="t")
w = v.replace(jnp.zeros(2))
print(type(w).__name__, w.tag, w.value, v.value)  # deprecated
w.copy_from(v)
u = w.copy()
print(w.value, u is w, u.get_metadata()["tag"])  # deprecated
v.raw_value = jnp.full(2, 3.0)  # deprecated
print(v.raw_value, v.get_raw_value())  # deprecated
print(v.type is nnx.Param, hasattr(v, "nothing"))
