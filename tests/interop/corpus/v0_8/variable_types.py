"""The type of a leaf: `.type` and `.var_type`."""

from flax import nnx

state = nnx.state(nnx.BatchNorm(2, rngs=nnx.Rngs(0)))
print({name: leaf.type.__name__ for name, leaf in state.items()})
print(state["mean"].var_type is nnx.BatchStat, isinstance(state["scale"], nnx.Param))
