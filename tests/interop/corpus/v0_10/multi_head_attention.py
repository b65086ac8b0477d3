"""Attention functions and masks."""

import jax.numpy as jnp
from flax import nnx

q = jnp.ones((1, 3, 2, 4))
mask = nnx.combine_masks(
    nnx.make_causal_mask(jnp.ones((1, 3))),
    nnx.make_attention_mask(jnp.ones((1, 3)), jnp.ones((1, 3))),
)
print(nnx.dot_product_attention(q, q, q, mask=mask).shape, mask.shape)
print(nnx.nn.attention.dot_product_attention_weights(q, q, mask=mask)[0, 0, 0])
