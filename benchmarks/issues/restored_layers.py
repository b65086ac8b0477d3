"""Restored layers permuted: a checkpoint turned the numbers of layers into strings."""

import jax.numpy as jnp
from flax import nnx


def make(numbers):
    return nnx.List([nnx.Param(jnp.array(number)) for number in numbers])


def in_place(layers):
    return sum(int(layer[...]) == place for place, layer in enumerate(layers))


graphdef, state = nnx.split(make(range(12)))
restored = {str(key): value for key, value in nnx.to_pure_dict(state).items()}

merged = nnx.merge(graphdef, restored)
print("of 12 layers, in their place after merge:", in_place(merged))
updated = make([-1] * 12)
nnx.update(updated, restored)
print("of 12 layers, in their place after update:", in_place(updated))
