"""Models: metadata and attributes set, walked over, views, made pure, in a capture."""

import jax
import jax.numpy as jnp
from flax import nnx


class Net(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(1))
        self.scale = jnp.array(2.0)


net = Net()
print(sorted(nnx.variables(net)), sorted(nnx.variables(net, nnx.Param)))

net = nnx.Sequential(
    nnx.Dropout(0.5, rngs=nnx.Rngs(0)), nnx.BatchNorm(2, rngs=nnx.Rngs(0))
)
evaluate = nnx.view(net, deterministic=True, use_running_average=True)
print(evaluate.layers[0].deterministic, net.layers[0].deterministic)
print(evaluate.layers[1].scale is net.layers[1].scale)
try:
    nnx.view(net, detreministic=True)
except ValueError as error:
    print("Unused keys found" in str(error))
print("use_running_average" in nnx.view_info(net))
other = nnx.with_attributes(net, rate=0.1)
net.set_attributes(rate=0.2)
print(net.layers[0].rate, other.layers[0].rate)

net = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
pure = nnx.as_pure(nnx.state(net))
print(pure["bias"], nnx.pure(nnx.state(net))["bias"])  # deprecated
print(isinstance(nnx.as_pure(net).bias, jax.Array))
nnx.set_metadata(net, only=nnx.Param, tag="t")
print(net.kernel.tag, net.bias.get_metadata("tag"))
net.kernel.del_metadata("tag")
net.kernel.set_metadata("note", 3)
print(net.kernel.has_metadata("tag"), net.kernel.get_metadata("tag", "none"))
print(net.kernel.note)
doubled = nnx.map(
    lambda path, x: x.replace(x[...] * 2) if isinstance(x, nnx.Variable) else x, net
)
print((doubled.kernel[...] == 2 * net.kernel[...]).all())
print(type(nnx.recursive_map(lambda path, node: node, net)).__name__)
graphdef, flat = nnx.graphlib.flatten(net)
print(len(flat), type(nnx.graphlib.unflatten(graphdef, flat)).__name__)
print("kernel" in net._pytree__nodes, "kernel" in net._object__nodes)  # deprecated
print(net._object__state is not None)  # deprecated
old = nnx.deprecations.deprecated(nnx.state)
print(sorted(old(net)))  # deprecated
