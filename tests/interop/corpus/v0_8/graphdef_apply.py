"""`GraphDef.apply` calls a method and returns the new state."""

import jax.numpy as jnp
from flax import nnx


class Counter(nnx.Module):
    def __init__(self):
        self.count = nnx.Variable(jnp.array(0))

    def __call__(self, step):
        self.count.value += step
        return self.count.value


graphdef, state = nnx.split(Counter())
y, (graphdef, state) = graphdef.apply(state)(3)
y, (graphdef, state) = graphdef.apply(state)(4)
print(y, state["count"].value)
assert state.count.value == 7
