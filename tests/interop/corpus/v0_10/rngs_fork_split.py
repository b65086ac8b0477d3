"""`Rngs.fork(split=...)`."""

from flax import nnx

rngs = nnx.Rngs(0, dropout=1)
forked = rngs.fork()
print((forked.params() == nnx.Rngs(0).params()).all())
split = rngs.fork(split=4)  # deprecated
print(split.params.key.value.shape, split.dropout.key.value.shape)  # deprecated
split = rngs.fork(split={"dropout": 2, ...: None})  # deprecated
print(split.params.key.value.shape, split.dropout.key.value.shape)  # deprecated
