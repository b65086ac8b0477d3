"""Layers by the keywords of that time, in one compiled program each."""

import jax.numpy as jnp
from flax import nnx


@nnx.jit
def images(x):
    rngs = nnx.Rngs(0)
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
    embed = nnx.Embed(num_embeddings=5, features=2, rngs=rngs)
    return x, nnx.max_pool(x, (2, 2), strides=(2, 2)), embed(jnp.array([1, 2]))


print([y.shape for y in images(jnp.ones((1, 4, 4, 3)))])


@nnx.jit
def attend(q):
    mask = nnx.combine_masks(
        nnx.make_causal_mask(jnp.ones((1, 3))),
        nnx.make_attention_mask(jnp.ones((1, 3)), jnp.ones((1, 3))),
    )
    print(nnx.dot_product_attention(q, q, q, mask=mask).shape, mask.shape)
    attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(0))
    attention(q[:, :, 0], sow_weights=True)  # deprecated
    weights = nnx.pop(attention, nnx.Intermediate)
    print(weights["attention_weights"].value[0].shape)  # deprecated
    return nnx.nn.attention.dot_product_attention_weights(q, q, mask=mask)[0, 0, 0]


@nnx.jit
def recur(x):
    forward = nnx.RNN(nnx.GRUCell(3, 4, rngs=nnx.Rngs(0)), return_carry=True)
    carry, y = forward(x, seq_lengths=jnp.array([2, 5]))
    cells = [nnx.SimpleCell(3, 4, rngs=nnx.Rngs(seed)) for seed in (1, 2)]
    print(carry.shape, y.shape, nnx.Bidirectional(*map(nnx.RNN, cells))(x).shape)
    return jnp.allclose(carry[0], y[0, 1])


print(attend(jnp.ones((1, 3, 2, 4))))
print(recur(jnp.ones((2, 5, 3))))
