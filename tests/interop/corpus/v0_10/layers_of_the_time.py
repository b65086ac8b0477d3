"""Layers by the keywords of that time."""

import jax.numpy as jnp
from flax import nnx

rngs = nnx.Rngs(0)
x = jnp.ones((1, 4, 4, 3))
layers = [
    nnx.Conv(
        in_features=3, out_features=2, kernel_size=(3, 3), padding="SAME", rngs=rngs
    ),
    nnx.ConvTranspose(2, 3, kernel_size=(2, 2), strides=(2, 2), rngs=rngs),
    nnx.GroupNorm(num_features=3, num_groups=3, rngs=rngs),
    nnx.LayerNorm(num_features=3, epsilon=1e-6, rngs=rngs),
    nnx.RMSNorm(3, rngs=rngs),
    nnx.LinearGeneral(3, (2, 2), rngs=rngs),
    nnx.Einsum("bhwij,ijk->bhwk", (2, 2, 5), (5,), rngs=rngs),
]
for layer in layers:
    x = layer(x)
print(x.shape, nnx.max_pool(x, (2, 2), strides=(2, 2)).shape)
print(nnx.Embed(num_embeddings=5, features=2, rngs=rngs)(jnp.array([1, 2])).shape)
