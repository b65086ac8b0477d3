"""An ensemble by `split_rngs` and `vmap`."""

import jax.numpy as jnp
from flax import nnx


@nnx.split_rngs(splits=4)
@nnx.vmap(in_axes=(0,), out_axes=0)
def create(rngs):
    return nnx.Linear(2, 3, rngs=rngs)


@nnx.vmap(in_axes=(0, None), out_axes=0)
def apply(model, x):
    return model(x)


model = create(nnx.Rngs(0))
y = apply(model, jnp.ones((1, 2)))
print(model.kernel.value.shape, y.shape, bool((y[0] == y[1]).all()))  # deprecated
