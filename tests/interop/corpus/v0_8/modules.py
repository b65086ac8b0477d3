"""Modules: dataclasses, iteration, surgery, modes, what they record."""

import dataclasses

import jax.numpy as jnp
from flax import nnx


@dataclasses.dataclass
class Scale(nnx.Module):
    factor: float
    rngs: nnx.Rngs

    def __post_init__(self):
        print(self.rngs.params.key.value.shape)  # deprecated
        self.w = nnx.Param(jnp.ones(2) * self.factor)


print(Scale(3.0, nnx.Rngs(0)).w.value)  # deprecated


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.sizes = (2, 2)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        self.sow(nnx.Intermediate, "y", x)  # deprecated
        return self.drop(self.norm(self.perturb("before", x)))  # deprecated


net = Net(nnx.Rngs(0, dropout=1))
graphdef, state = nnx.split(net)
print(sorted(state["layers"]), nnx.merge(graphdef, state).sizes, len(net.layers))
for layer in net.layers:
    layer.bias.value += 1  # deprecated
print([float(layer.bias.value.sum()) for layer in net.layers])  # deprecated
print([type(module).__name__ for path, module in net.iter_modules()])  # deprecated
print([name for name, child in net.iter_children()])  # deprecated
nodes = [node for path, node in nnx.iter_graph(net)]
print(sum(isinstance(node, nnx.Variable) for node in nodes))

x = jnp.arange(4.0).reshape(2, 2)
net.train()
net(x)
print(net.drop.deterministic, net.norm.use_running_average)
print(net.norm.mean.value)  # deprecated
net.eval()
print(net.drop.deterministic, jnp.allclose(net(x), net(x)))
net.set_attributes(nnx.Dropout, rate=0.1)
print(net.drop.rate)
perturbations = nnx.DiffState(0, nnx.Perturbation)
grads = nnx.grad(lambda net: net(x).sum(), argnums=perturbations)(net)
print(grads["before"].value)  # deprecated
sown = nnx.pop(net, nnx.Intermediate)
print(len(sown["y"].value), sown["y"].value[1], hasattr(net, "y"))  # deprecated

# Layers are shared and replaced.
first, second = net.layers
net.layers[1] = first
print(len(nnx.state(net.layers).flat_state()), net.layers[0] is first)  # deprecated
net.layers[0] = nnx.LoRALinear(2, 2, lora_rank=1, rngs=nnx.Rngs(1))
first.kernel = nnx.Param(jnp.zeros((2, 2)))
print(["/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(net))])
