"""States as pure dicts, by methods."""

import jax
import jax.numpy as jnp
from flax import nnx

model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
state = nnx.state(model)
pure = state.to_pure_dict()  # deprecated
print(type(pure["kernel"]).__name__ != "Param", sorted(pure))
doubled = jax.tree.map(lambda x: x * 2, pure)
state.replace_by_pure_dict(doubled)  # deprecated
nnx.update(model, state)
print(jnp.allclose(model.kernel[...], doubled["kernel"]))
