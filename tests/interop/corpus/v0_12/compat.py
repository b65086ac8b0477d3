"""`nnx.compat` fixes the modes."""

import jax.numpy as jnp
from flax import nnx

net = nnx.Dict(a=nnx.Param(jnp.array(1.0)))


@nnx.compat.jit
def f(net):
    net.b = nnx.Param(net.a[...] + 1)


with nnx.set_graph_mode(False):
    f(net)
    graphdef, state = nnx.compat.split(net)
print(net.b[...], sorted(state))
