"""Layers in lists, tuples and dicts that are declared as data."""

from flax import nnx


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(2)])
        self.sizes = (2, 2)
        self.name = "net"


net = Net(nnx.Rngs(0))
graphdef, state = nnx.split(net)
print(sorted(state["layers"]), nnx.merge(graphdef, state).sizes, len(net.layers))
for layer in net.layers:
    layer.bias.value += 1  # deprecated
print([float(layer.bias.value.sum()) for layer in net.layers])  # deprecated
