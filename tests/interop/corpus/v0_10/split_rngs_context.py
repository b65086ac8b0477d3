"""`split_rngs` as a context and as a decorator, by stream."""

from flax import nnx

rngs = nnx.Rngs(params=0, dropout=1)
with nnx.split_rngs(rngs, splits=3, only="params"):
    print(rngs.params.key.value.shape, rngs.dropout.key.value.shape)  # deprecated
print(rngs.params.key.value.shape, rngs.params.count.value)  # deprecated


@nnx.split_rngs(splits=3, only="params")
def look(rngs):
    return rngs.params.key.value.shape, rngs.dropout.key.value.shape  # deprecated


print(look(nnx.Rngs(params=0, dropout=1)))
