"""`Data` and `Static` as annotations."""

import jax
import jax.numpy as jnp
from flax import nnx


class Net(nnx.Module):  # deprecated
    layers: nnx.Data[list]
    name: nnx.Static[str]

    def __init__(self):
        self.layers = [nnx.Param(jnp.ones(1)), nnx.Param(jnp.zeros(1))]
        self.name = "net"


print(len(jax.tree.leaves(Net())))
