"""Streams: numbers drawn, forked and split, replaced in a model, seeded anew."""

import jax
from flax import nnx

rngs = nnx.Rngs(0)
x = rngs.normal((2, 3))
y = rngs.uniform((4,))
print(x.shape, y.shape, rngs.default.count.value)  # deprecated
print(rngs.params.bernoulli(0.5, (3,)).dtype, rngs.randint((2,), 0, 5).shape)

rngs = nnx.Rngs(0, dropout=1)
forked = rngs.fork()
print((forked.params() == nnx.Rngs(0).params()).all())
split = rngs.fork(split=4)  # deprecated
print(split.params.key.value.shape, split.dropout.key.value.shape)  # deprecated
split = rngs.fork(split={"dropout": 2, ...: None})  # deprecated
print(split.params.key.value.shape, split.dropout.key.value.shape)  # deprecated

rngs = nnx.Rngs(params=0, dropout=1)
with nnx.split_rngs(rngs, splits=3, only="params"):
    print(rngs.params.key.value.shape, rngs.dropout.key.value.shape)  # deprecated
print(rngs.params.key.value.shape, rngs.params.count.value)  # deprecated


@nnx.split_rngs(splits=3, only="params")
def look(rngs):
    return rngs.params.key.value.shape, rngs.dropout.key.value.shape  # deprecated


print(look(nnx.Rngs(params=0, dropout=1)))

drop = nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=0))
backups = nnx.split_rngs(drop, splits=2)
print(drop.rngs.key.value.shape)  # deprecated
nnx.restore_rngs(backups)
print(drop.rngs.key.value.shape, drop.rngs.count.value)  # deprecated
drop.rngs()
nnx.reseed(drop, dropout=3)
stream = drop.rngs
print(stream.count.value, (stream.key.value == jax.random.key(3)).all())  # deprecated
