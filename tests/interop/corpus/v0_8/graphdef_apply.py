"""`GraphDef.apply` calls a method and returns the new state."""

import jax.numpy as jnp
from flax import nnx


class Counter(nnx.Module):
    def __init__(self):
        self.count = nnx.Variable(jnp.array(0))

    def __call__(self, step):
        self.count.value += step  # deprecated
        return self.count.value  # deprecated


graphdef, state = nnx.split(Counter())
y, (graphdef, state) = graphdef.apply(state)(3)
y, (graphdef, state) = graphdef.apply(state)(4)
print(y, state["count"].value)  # deprecated
assert state.count.value == 7  # deprecated
