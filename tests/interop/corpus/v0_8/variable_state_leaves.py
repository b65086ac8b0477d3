"""`VariableState` as the type of leaves."""

import jax
import jax.numpy as jnp
from flax import nnx

state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
leaves = jax.tree.leaves(
    state,
    is_leaf=lambda x: isinstance(x, nnx.VariableState),  # deprecated
)
print(
    [leaf.type.__name__ for leaf in leaves],
    [leaf.value.shape for leaf in leaves],  # deprecated
)
zeros = jax.tree.map(
    lambda leaf: leaf.replace(jnp.zeros_like(leaf.value)),  # deprecated
    state,
    is_leaf=lambda x: isinstance(x, nnx.VariableState),  # deprecated
)
print(zeros["kernel"].value.sum(), type(zeros["kernel"]).__name__)  # deprecated
