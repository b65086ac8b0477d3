"""`remat` inside `scan`."""

import jax.numpy as jnp
from flax import nnx


@nnx.split_rngs(splits=3)
@nnx.vmap
def create(rngs):
    return nnx.Linear(2, 2, rngs=rngs)


layers = create(nnx.Rngs(0))


@nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
@nnx.remat
def forward(layer, x):
    return layer(x)


grads = nnx.grad(lambda m: forward(m, jnp.ones((1, 2))).sum())(layers)
print(grads["kernel"].value.shape)  # deprecated
