"""`scan` over a stack of layers."""

import jax.numpy as jnp
from flax import nnx


class Stack(nnx.Module):
    def __init__(self, dim, depth, rngs):
        @nnx.split_rngs(splits=depth)
        @nnx.vmap
        def create(rngs):
            return nnx.Linear(dim, dim, rngs=rngs)

        self.layers = create(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x, layer):
            return nnx.tanh(layer(x))

        return forward(x, self.layers)


stack = Stack(3, 5, nnx.Rngs(0))
print(stack(jnp.ones((1, 3))).round(3), stack.layers.kernel.value.shape)  # deprecated
