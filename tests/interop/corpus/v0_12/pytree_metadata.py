"""`nnx.set_metadata`, and metadata of Variables."""

from flax import nnx

net = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
nnx.set_metadata(net, only=nnx.Param, tag="t")
print(net.kernel.tag, net.bias.get_metadata("tag"))
net.kernel.del_metadata("tag")
print(net.kernel.has_metadata("tag"), net.kernel.get_metadata("tag", "none"))
net.kernel.set_metadata("note", 3)
print(net.kernel.note)
