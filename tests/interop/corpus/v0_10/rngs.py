"""Streams: numbers drawn, forked and split, replaced in a model, seeded anew."""

import jax
from flax import nnx

rngs = nnx.Rngs(0)
x, y = rngs.normal((2, 3)), rngs.uniform((4,))
print(x.shape, y.shape, rngs.default.count.value)  # deprecated
print(rngs.params.bernoulli(0.5, (3,)).dtype, rngs.randint((2,), 0, 5).shape)


def shapes(rngs):
    return rngs.params.key.value.shape, rngs.dropout.key.value.shape  # deprecated


rngs = nnx.Rngs(params=0, dropout=1)
print((rngs.fork().params() == nnx.Rngs(params=0).params()).all())
print(shapes(rngs.fork(split=4)))  # deprecated
print(shapes(rngs.fork(split={"dropout": 2, ...: None})))  # deprecated
with nnx.split_rngs(rngs, splits=3, only="params"):
    print(shapes(rngs))
print(shapes(rngs), rngs.params.count.value)  # deprecated
print(nnx.split_rngs(splits=3, only="params")(shapes)(rngs))

drop = nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=0))
backups = nnx.split_rngs(drop, splits=2)
print(drop.rngs.key.value.shape)  # deprecated
nnx.restore_rngs(backups)
print(drop.rngs.key.value.shape, drop.rngs.count.value)  # deprecated
drop.rngs()
nnx.reseed(drop, dropout=3)
stream = drop.rngs
print(stream.count.value, (stream.key.value == jax.random.key(3)).all())  # deprecated
