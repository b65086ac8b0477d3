"""A GraphDef is hashable: a static argument of `jax.jit`."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

graphdef, state = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))


@partial(jax.jit, static_argnums=0)
def forward(graphdef, state, x):
    return nnx.merge(graphdef, state)(x)


print(forward(graphdef, state, jnp.ones((1, 2))).shape)
other = nnx.graphdef(nnx.Linear(2, 3, rngs=nnx.Rngs(1)))
print(hash(other) == hash(graphdef), other == graphdef)
print(nnx.graphdef(nnx.Linear(3, 3, rngs=nnx.Rngs(1))) == graphdef)
