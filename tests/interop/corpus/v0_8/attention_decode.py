"""Attention, and decoding step by step with a cache."""

import jax.numpy as jnp
from flax import nnx

attention = nnx.MultiHeadAttention(
    num_heads=2, in_features=4, qkv_features=8, decode=False, rngs=nnx.Rngs(0)
)
x = jnp.arange(24.0).reshape(1, 6, 4) / 24
whole = attention(x, mask=nnx.make_causal_mask(jnp.ones((1, 6))))
attention.init_cache(x.shape)
steps = [attention(x[:, i : i + 1], decode=True) for i in range(6)]
print(whole.shape, jnp.allclose(jnp.concatenate(steps, 1), whole, atol=1e-5))
print(attention.cache_index.value)  # deprecated
