"""Filters in all their forms."""

import jax.numpy as jnp
from flax import nnx


class Net(nnx.Module):
    def __init__(self, rngs):
        self.a = nnx.Linear(1, 1, rngs=rngs)
        self.b = nnx.BatchNorm(1, rngs=rngs)
        self.c = nnx.Variable(jnp.ones(1), tag="special")


net = Net(nnx.Rngs(0))


def paths(*filters):
    return [[p for p, _ in nnx.to_flat_state(s)] for s in nnx.split(net, *filters)[1:]]


print(paths(nnx.Any(nnx.BatchStat, "special"), ...))
print(paths(nnx.All(nnx.Param, nnx.Not(nnx.PathContains("a"))), nnx.Everything()))
print(paths(lambda path, v: path[-1] == "bias", nnx.OfType(nnx.Param), ...))
print(paths((nnx.Param, nnx.BatchStat), nnx.WithTag("special"), nnx.Nothing()))
