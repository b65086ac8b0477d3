"""Annotations as strings, under `from __future__ import annotations`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class Net(nnx.Module):  # deprecated
    layers: nnx.Data[list]

    def __init__(self):
        self.layers = [nnx.Param(jnp.ones(1))]


print(len(jax.tree.leaves(Net())))
