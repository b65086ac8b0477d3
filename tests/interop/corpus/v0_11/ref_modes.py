"""`use_refs`, `to_refs`, `to_arrays`, as in 0.11 and 0.12.0.

Not in Flax today.
"""

import jax
import jax.numpy as jnp
from flax import nnx

with nnx.use_refs(True):
    count = nnx.Variable(jnp.array(0))
print(count.has_ref, nnx.using_refs())


@jax.jit
def up(count):
    count[...] += 1


up(count)
print(count[...])
model = nnx.to_refs(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
frozen = nnx.to_arrays(model)
print(
    model.kernel.has_ref,
    frozen.kernel.has_ref,
    nnx.is_array_ref(model.kernel.get_raw_value()),
)
assert nnx.array_ref is jax.new_ref and nnx.ArrayRef is jax.Ref
