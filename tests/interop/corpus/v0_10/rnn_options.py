"""An RNN both ways, with lengths, and its carry."""

import jax.numpy as jnp
from flax import nnx

forward = nnx.RNN(nnx.GRUCell(3, 4, rngs=nnx.Rngs(0)), return_carry=True)
carry, y = forward(jnp.ones((2, 5, 3)), seq_lengths=jnp.array([2, 5]))
print(carry.shape, y.shape, jnp.allclose(carry[0], y[0, 1]))
both = nnx.Bidirectional(
    nnx.RNN(nnx.SimpleCell(3, 4, rngs=nnx.Rngs(1))),
    nnx.RNN(nnx.SimpleCell(3, 4, rngs=nnx.Rngs(2))),
)
print(both(jnp.ones((2, 5, 3))).shape)
