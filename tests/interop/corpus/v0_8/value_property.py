"""Values are read and written by `.value`."""

import jax.numpy as jnp
from flax import nnx

layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
layer.bias.value = jnp.arange(3.0)  # deprecated
layer.bias.value += 1  # deprecated
layer.kernel.value = layer.kernel.value * 0  # deprecated
print(layer(jnp.ones((1, 2))), layer.bias.value.shape)  # deprecated
count = nnx.Variable(5)
count.value -= 2  # deprecated
assert count.value == 3  # deprecated
