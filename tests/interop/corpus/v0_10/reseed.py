"""`reseed` gives streams new keys."""

import jax
from flax import nnx

net = nnx.Sequential(nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=0)))
net.layers[0].rngs()
nnx.reseed(net, dropout=3)
stream = net.layers[0].rngs
print(stream.count.value, (stream.key.value == jax.random.key(3)).all())  # deprecated
