"""`with_attributes` and `set_attributes`."""

from flax import nnx

net = nnx.Sequential(nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
other = nnx.with_attributes(net, rate=0.1)
print(other.layers[0].rate, net.layers[0].rate)
net.set_attributes(rate=0.2)
print(net.layers[0].rate, other.layers[0].rate)
