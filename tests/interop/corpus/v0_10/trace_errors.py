"""Errors of `flax.errors` are caught."""

import flax
import jax
import jax.numpy as jnp
from flax import nnx
from flax.errors import TraceContextError

v = nnx.Variable(jnp.array(0))


@jax.jit
def f():
    v.value += 1  # deprecated


try:
    f()
except TraceContextError as error:
    print(
        "different trace level" in str(error), isinstance(error, flax.errors.FlaxError)
    )
