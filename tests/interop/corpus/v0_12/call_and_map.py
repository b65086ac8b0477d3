"""`nnx.call`, `nnx.map`, `nnx.recursive_map`, `nnx.flatten`."""

from flax import nnx

net = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
doubled = nnx.map(
    lambda path, x: x.replace(x[...] * 2) if isinstance(x, nnx.Variable) else x, net
)
print((doubled.kernel[...] == 2 * net.kernel[...]).all())
count = nnx.recursive_map(lambda path, node: node, net)
print(type(count).__name__)
graphdef, flat = nnx.graphlib.flatten(net)
print(len(flat), type(nnx.graphlib.unflatten(graphdef, flat)).__name__)
