"""`nnx.with_sharding_constraint`, as older documents have it.

Not in Flax today.
"""

import jax
from flax import nnx

mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
state = nnx.state(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
placed = nnx.with_sharding_constraint(state, nnx.get_named_sharding(state, mesh))
print(placed["bias"][...].shape, placed["bias"].get_value().sharding.spec)
