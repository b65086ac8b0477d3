"""Abstract models are made by `eval_shape`, and filled by `merge`."""

import jax
import jax.numpy as jnp
from flax import nnx

abstract = nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
graphdef, state = nnx.split(abstract)
print(state["kernel"].value)  # deprecated
filled = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), state)
print(nnx.merge(graphdef, filled)(jnp.ones((1, 2))))
