"""States as pure dicts, by functions, with string keys of lists."""

import jax.numpy as jnp
from flax import nnx

model = nnx.Sequential(
    nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(2, 1, rngs=nnx.Rngs(1))
)
graphdef, state = nnx.split(model)
pure = nnx.to_pure_dict(state)
print(sorted(pure["layers"]))
strings = {"layers": {str(k): v for k, v in pure["layers"].items()}}
restored = nnx.restore_int_paths(strings)
print(sorted(restored["layers"]))
nnx.replace_by_pure_dict(state, restored)
print(nnx.merge(graphdef, state)(jnp.ones((1, 2))).shape)
