"""`StateAxes` maps parts of a model over different axes."""

import jax.numpy as jnp
from flax import nnx

axes = nnx.StateAxes({nnx.Param: 0, nnx.BatchStat: None})


class Net(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.arange(3.0))
        self.m = nnx.BatchStat(jnp.array(10.0))


@nnx.vmap(in_axes=(axes, None))
def forward(net, x):
    return net.w * x + net.m


print(forward(Net(), 2.0), list(axes.values()), len(axes.filters))
