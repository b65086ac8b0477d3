"""A stack made by `vmap`, run by `jax.lax.scan`."""

import jax
import jax.numpy as jnp
from flax import nnx


@nnx.vmap(in_axes=0, out_axes=0)
def create(rngs):
    return nnx.Linear(2, 2, rngs=rngs)


stack = create(nnx.Rngs(0).split(3))
y, _ = jax.lax.scan(lambda x, layer: (layer(x), None), jnp.ones((1, 2)), stack)
print(y.round(3))
