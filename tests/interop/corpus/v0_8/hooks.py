"""Hooks of Variables run when values are written or read."""

import warnings

import jax.numpy as jnp
from flax import nnx

warnings.simplefilter("ignore", UserWarning)
log = []


def note(variable, value):
    log.append("set")
    return value


v = nnx.Variable(jnp.array(1.0), on_set_value=note)
v.value = jnp.array(2.0)  # deprecated
print(log, v.value)  # deprecated
