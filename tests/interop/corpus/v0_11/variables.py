"""Variables: items, values that are pytrees, those that are shared, and views."""

import jax.numpy as jnp
from flax import nnx
from flax.nnx import graph

v = nnx.Param(jnp.zeros((2, 3)))
v[...] = 5.0
v[0] = jnp.arange(3.0)
v[...] += 1
print(v[...], v[0, 1], v.get_value().sum())
v.set_value(jnp.ones(2))
print(v[...].shape)
v = nnx.Variable({"a": jnp.ones(2), "b": 3})
print(v.get_value()["b"], v["a"])

net = nnx.Dict(a=nnx.Param(jnp.ones(1)), b=nnx.Cache(jnp.zeros(1)))
net.c = net.a
print(nnx.find_duplicates(net))
merged = nnx.merge(*nnx.split(net))
print(merged.a is merged.c)
(caches,) = graph.graph_pop(net, (nnx.Cache,))
print(sorted(caches), hasattr(net, "b"))
print(graph.with_vars(net, ref=False).a.shape)
