"""Functions of `nnx.graph`, as libraries used them."""

import jax.numpy as jnp
from flax import nnx
from flax.nnx import graph

net = nnx.Dict(a=nnx.Param(jnp.ones(1)), b=nnx.Cache(jnp.ones(1)))
(caches,) = graph.graph_pop(net, (nnx.Cache,))
print(sorted(caches), hasattr(net, "b"))
print(graph.with_vars(net, ref=False).a.shape)
