"""`nnx.data()` and `nnx.static()` as fields of a dataclass."""

import jax
import jax.numpy as jnp
from flax import nnx


@nnx.dataclass
class Net(nnx.Module):
    layers: list = nnx.data()
    name: str = nnx.static(default="net")


net = Net([nnx.Param(jnp.ones(1)), nnx.Param(jnp.zeros(1))])
print(len(jax.tree.leaves(net)), net.name, nnx.is_data(net.layers))
