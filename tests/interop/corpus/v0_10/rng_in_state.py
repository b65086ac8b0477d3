"""Rng state is split off, and merged back."""

import jax
import jax.numpy as jnp
from flax import nnx

net = nnx.Sequential(
    nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=1))
)
graphdef, params, rng_state = nnx.split(net, nnx.Param, nnx.RngState)


@jax.jit
def forward(params, rng_state, x):
    net = nnx.merge(graphdef, params, rng_state)
    y = net(x)
    return y, nnx.state(net, nnx.RngState)


y, after = forward(params, rng_state, jnp.ones((1, 2)))
print(y.shape, after["layers"][1]["rngs"]["count"].value)  # deprecated
keys, counts = nnx.split_state(rng_state, nnx.RngKey, nnx.RngCount)
print(len(nnx.to_flat_state(keys)), len(nnx.to_flat_state(counts)))
