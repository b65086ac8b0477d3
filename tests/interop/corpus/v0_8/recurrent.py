"""A recurrent layer over a sequence."""

import jax.numpy as jnp
from flax import nnx

cell = nnx.LSTMCell(in_features=3, hidden_features=4, rngs=nnx.Rngs(0))
rnn = nnx.RNN(cell)
y = rnn(jnp.ones((2, 5, 3)))
carry, z = cell(cell.initialize_carry((2, 3), nnx.Rngs(1)), jnp.ones((2, 3)))
print(y.shape, jnp.allclose(y[:, 0], z), len(carry))
