"""`fork_rngs` replaces streams inside a model, and puts them back."""

from flax import nnx

drop = nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=0))
backups = nnx.split_rngs(drop, splits=2)
print(drop.rngs.key.value.shape)  # deprecated
nnx.restore_rngs(backups)
print(drop.rngs.key.value.shape, drop.rngs.count.value)  # deprecated
