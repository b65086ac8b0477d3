"""Identities and structure across `jax.jit` by contexts."""

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
doubled = jax.jit(lambda state: jax.tree.map(lambda x: x * 2, state))(state)
with nnx.merge_context() as ctx:
    again = ctx.merge(graphdef, doubled)
print(again.b is again, again.a.value)  # deprecated


@nnx.update_context("mine")
def grow(net):
    with nnx.split_context("mine") as ctx:
        graphdef, state = ctx.split(net)

    @jax.jit
    def inside(state):
        with nnx.merge_context("mine", inner=True) as ctx:
            net = ctx.merge(graphdef, state)
        net.b = nnx.Param(net.a.value + 4)  # deprecated
        with nnx.split_context("mine") as ctx:
            return ctx.split(net)

    graphdef_out, state_out = inside(state)
    with nnx.merge_context("mine", inner=False) as ctx:
        return ctx.merge(graphdef_out, state_out)


print(grow(net) is net, net.b.value)  # deprecated
