"""Streams draw numbers themselves."""

from flax import nnx

rngs = nnx.Rngs(0)
x = rngs.normal((2, 3))
y = rngs.uniform((4,))
print(x.shape, y.shape, rngs.default.count.value)  # deprecated
print(rngs.params.bernoulli(0.5, (3,)).dtype, rngs.randint((2,), 0, 5).shape)
