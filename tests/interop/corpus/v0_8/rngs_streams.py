"""Streams are called for keys; `fork` makes others."""

import jax
from flax import nnx

rngs = nnx.Rngs(0, dropout=1)
first, second = rngs.params(), rngs.params()
print(
    (first == second).all(),
    rngs.params.count.value,  # deprecated
    rngs.dropout.count.value,  # deprecated
)
print(jax.random.key_data(rngs.noise()), "noise" in rngs)
state = nnx.state(rngs)
print(sorted(state), rngs.dropout.key.value.dtype)  # deprecated
