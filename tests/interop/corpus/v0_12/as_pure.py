"""`as_pure`, and its older name."""

import jax
from flax import nnx

net = nnx.Linear(1, 2, rngs=nnx.Rngs(0))
print(
    nnx.as_pure(nnx.state(net))["bias"],
    nnx.pure(nnx.state(net))["bias"],  # deprecated
)
print(isinstance(nnx.as_pure(net).bias, jax.Array))
