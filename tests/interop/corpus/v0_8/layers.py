"""Layers: attention that decodes, recurrence, running averages."""

import jax.numpy as jnp
from flax import nnx


@nnx.jit
def decode(x):
    attention = nnx.MultiHeadAttention(
        num_heads=2, in_features=4, qkv_features=8, decode=False, rngs=nnx.Rngs(0)
    )
    whole = attention(x, mask=nnx.make_causal_mask(x[..., 0]))
    attention.init_cache(x.shape)
    steps = [attention(x[:, i : i + 1], decode=True) for i in range(3)]
    return whole - jnp.concatenate(steps, 1), attention.cache_index.value  # deprecated


@nnx.jit
def recur(x):
    cell = nnx.LSTMCell(in_features=4, hidden_features=4, rngs=nnx.Rngs(0))
    y = nnx.RNN(cell)(x)
    carry, z = cell(cell.initialize_carry((1, 4), nnx.Rngs(1)), x[:, 0])
    print(y.shape, len(carry))
    return y[:, 0] - z


x = jnp.arange(12.0).reshape(1, 3, 4) / 12
difference, index = decode(x)
print(difference.shape, jnp.abs(difference).max() < 1e-5, index)
print(jnp.abs(recur(x)).max() < 1e-5)

norm = nnx.BatchNorm(2, momentum=0.9, use_running_average=False, rngs=nnx.Rngs(0))
x = jnp.array([[1.0, 2.0], [3.0, 6.0]])
print(nnx.jit(lambda norm: norm(x).round(3))(norm))
print(norm.mean.value, norm.var.value)  # deprecated
print(nnx.jit(lambda norm: norm(x, use_running_average=True).round(3))(norm))
