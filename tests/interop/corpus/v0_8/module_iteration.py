"""`iter_modules` and `iter_children` as methods, `iter_graph` as a function."""

from flax import nnx

net = nnx.Sequential(
    nnx.Linear(1, 1, rngs=nnx.Rngs(0)), nnx.BatchNorm(1, rngs=nnx.Rngs(0))
)
print([type(module).__name__ for path, module in net.iter_modules()])  # deprecated
print([name for name, child in net.layers[0].iter_children()])  # deprecated
nodes = [node for path, node in nnx.iter_graph(net)]
print(sum(isinstance(node, nnx.Variable) for node in nodes))
