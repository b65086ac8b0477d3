"""Names of `nnx.graph` that libraries used."""

from flax import nnx
from flax.nnx import graph

net = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
graphdef, state = graph.split(net)
print(
    isinstance(graphdef, graph.GraphDef), graph.is_node(net), graph.is_graph_node(net)
)
print([path for path, node in graph.iter_graph(net) if isinstance(node, nnx.Variable)])
print(sorted(graph.state(graph.merge(graphdef, state))))
copied = graph.clone(net)
print(copied is net, (copied.kernel.value == net.kernel.value).all())  # deprecated
