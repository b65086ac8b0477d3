"""`Rngs.split`, `with_rngs`, `fork_rngs`, `split_rngs`."""

from flax import nnx

rngs = nnx.Rngs(params=0, dropout=1)
print(rngs.split(3).params.key[...].shape)
print(rngs.split({"dropout": 2}).dropout.key[...].shape)
drop = nnx.Dropout(0.5, rngs=rngs)
split = nnx.with_rngs(drop, split=4, graph_updates=False)
print(split.rngs.key[...].shape, drop.rngs.key[...].shape)
backups = nnx.fork_rngs(drop)
print(drop.rngs.count[...])
nnx.restore_rngs(backups)
