"""Modules that are dataclasses, and a list of layers in a tuple."""

import dataclasses

import jax.numpy as jnp
from flax import nnx


@dataclasses.dataclass
class Scale(nnx.Module):
    factor: float
    rngs: nnx.Rngs

    def __post_init__(self):
        self.w = nnx.Param(
            self.rngs.params.key.value is not None  # deprecated
            and jnp.ones(2) * self.factor  # deprecated
        )

    def __call__(self, x):
        return x * self.w


print(Scale(3.0, nnx.Rngs(0))(jnp.ones(2)))
