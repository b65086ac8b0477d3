"""Attention weights are sown into the module."""

import jax.numpy as jnp
from flax import nnx

attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(0))
attention(jnp.ones((1, 3, 4)), sow_weights=True)  # deprecated
weights = nnx.pop(attention, nnx.Intermediate)
print(weights["attention_weights"].value[0].shape)  # deprecated
