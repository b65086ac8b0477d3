"""Random keys drawn twice: streams that a split leaves alone start again from zero."""

import jax
from flax import nnx


def draw(rngs):
    return {str(jax.random.key_data(rngs.dropout())) for _ in range(3)}


rngs = nnx.Rngs(params=1, dropout=2)
before = draw(rngs)
after = draw(rngs.split({"params": 4, "dropout": None}))
print("of 3 keys, drawn a second time:", len(before & after))
