"""Tree mode: objects are pytrees, and aliases are errors."""

import jax.numpy as jnp
from flax import nnx


class Net(nnx.Module):
    def __init__(self):
        self.a = nnx.Param(jnp.ones(1))
        self.b = self.a


with nnx.set_graph_mode(False):
    try:
        nnx.split(Net())
    except ValueError as error:
        print("does not support shared references" in str(error))
print(len(nnx.to_flat_state(nnx.state(Net()))), nnx.set_graph_mode.current_value())
with nnx.set_graph_updates(False):
    print(nnx.set_graph_updates.current_value())
