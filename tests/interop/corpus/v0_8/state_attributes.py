"""Nested States are read and written as attributes."""

import jax.numpy as jnp
from flax import nnx

state = nnx.State(
    {"a": {"b": nnx.Param(jnp.array(1.0))}, "c": nnx.Param(jnp.array(2.0))}
)
state.a.b.value = jnp.array(5.0)  # deprecated
print(state.a.b.value, "a" in state, hasattr(state, "z"), len(state))  # deprecated
state.d = nnx.Param(jnp.array(7.0))
print(sorted(state.keys()), state["d"].value)  # deprecated
del state["c"]
print(sorted(state))
