"""An RNN closed over by jit: its first carry, all zeros, draws a random key."""

import jax
import jax.numpy as jnp
from flax import nnx

rnn = nnx.RNN(nnx.LSTMCell(3, 4, rngs=nnx.Rngs(0)))
x = jnp.ones((2, 5, 3))
compiled = jax.jit(lambda x: rnn(x))(x)
print("largest difference from the eager call:", jnp.abs(compiled - rnn(x)).max())
