"""Initializers with metadata."""

import jax
import jax.numpy as jnp
from flax import nnx

init = nnx.with_metadata(nnx.initializers.zeros_init(), tag="mine")
layer = nnx.Linear(2, 3, kernel_init=init, rngs=nnx.Rngs(0))
print(layer.kernel.tag, layer.kernel.value.shape)  # deprecated
box = init(jax.random.key(0), (2,), jnp.float32)
print(type(box).__name__, box.metadata["tag"])
