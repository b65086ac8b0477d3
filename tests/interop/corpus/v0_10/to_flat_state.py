"""Flat states by functions."""

from flax import nnx

state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
flat = nnx.to_flat_state(state)
print(flat.paths, [leaf.value.shape for leaf in flat.leaves])  # deprecated
changed = nnx.from_flat_state(
    [(path, leaf.replace(leaf.value * 0)) for path, leaf in flat]  # deprecated
)
print(changed["bias"].value)  # deprecated
print(list(dict(flat)) == list(flat.paths))
