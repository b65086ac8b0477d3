"""split_context and merge_context keep identities."""

import jax
import jax.numpy as jnp
from flax import nnx


class Net(nnx.Module):
    def __init__(self):
        self.a = nnx.Param(jnp.array(1.0))
        self.b = self


net = Net()
with nnx.split_context() as ctx:
    graphdef, state = ctx.split(net)


@jax.jit
def double(state):
    return jax.tree.map(lambda x: x * 2, state)


with nnx.merge_context() as ctx:
    again = ctx.merge(graphdef, double(state))
print(again.b is again, again.a.value)  # deprecated
