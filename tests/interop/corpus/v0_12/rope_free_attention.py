"""Attention by the keywords of today."""

import jax.numpy as jnp
from flax import nnx

attention = nnx.MultiHeadAttention(
    num_heads=2, in_features=4, rngs=nnx.Rngs(0), decode=False, normalize_qk=True
)
x = jnp.ones((1, 3, 4))
y = attention(x, mask=nnx.make_causal_mask(x[..., 0]))
print(y.shape, jnp.allclose(attention(x, x, x), attention(x)))
