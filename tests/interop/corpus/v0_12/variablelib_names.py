"""`nnx.variablelib` names of today."""

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx import variablelib

print(
    variablelib.is_array_ref(jnp.ones(1)),
    variablelib.is_array_ref(jax.new_ref(jnp.ones(1))),
)
print(nnx.var_defaults().ref, variablelib.VariableMetadata is nnx.VariableMetadata)
