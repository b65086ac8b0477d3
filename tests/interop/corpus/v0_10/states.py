"""States by functions and filters, streams in them, and names of `nnx.graph`."""

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx import graph


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.c = nnx.Variable(jnp.ones(1), tag="special")


net = Net(nnx.Rngs(0))
state = nnx.state(net)
params, rest = nnx.split_state(state, nnx.Param, ...)
print(sorted(rest["norm"]), sorted(nnx.filter_state(state, nnx.BatchStat)["norm"]))
print(sorted(nnx.merge_state(params, rest)["norm"]))
names = nnx.map_state(lambda path, v: "/".join(map(str, path)), params)
print(names["linear"]["kernel"])

flat = nnx.to_flat_state(params)
print(flat.paths, [leaf.value.shape for leaf in flat.leaves])  # deprecated
changed = nnx.from_flat_state(
    [(path, leaf.replace(leaf.value * 0)) for path, leaf in flat]  # deprecated
)
print(changed["linear"]["bias"].value, list(dict(flat)))  # deprecated


def paths(*filters):
    return [[p for p, _ in nnx.to_flat_state(s)] for s in nnx.split(net, *filters)[1:]]


print(paths(nnx.Any(nnx.BatchStat, "special"), ...))
print(paths(nnx.All(nnx.Param, nnx.Not(nnx.PathContains("norm"))), nnx.Everything()))
print(paths(lambda path, v: path[-1] == "bias", nnx.OfType(nnx.Param), ...))
print(paths((nnx.Param, nnx.BatchStat), nnx.WithTag("special"), nnx.Nothing()))
try:
    nnx.split(net, nnx.Param)
except ValueError as error:
    print("Non-exhaustive filters" in str(error))

# Random state is split off, and merged back.
net = nnx.Sequential(net.linear, nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=1)))
graphdef, params, rng_state = nnx.split(net, nnx.Param, nnx.RngState)


@jax.jit
def forward(params, rng_state, x):
    net = nnx.merge(graphdef, params, rng_state)
    return net(x), nnx.state(net, nnx.RngState)


y, after = forward(params, rng_state, jnp.ones((1, 2)))
print(y.shape, after["layers"][1]["rngs"]["count"].value)  # deprecated
keys, counts = nnx.split_state(rng_state, nnx.RngKey, nnx.RngCount)
print(len(nnx.to_flat_state(keys)), len(nnx.to_flat_state(counts)))

net = net.layers[0]
graphdef, state = graph.split(net)
is_node, is_graph_node = graph.is_node(net), graph.is_graph_node(net)
print(isinstance(graphdef, graph.GraphDef), is_node, is_graph_node)
print([path for path, node in graph.iter_graph(net) if isinstance(node, nnx.Variable)])
print(sorted(graph.state(graph.merge(graphdef, state))), graph.clone(net) is net)
