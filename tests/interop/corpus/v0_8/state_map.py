"""`State.map` over paths and leaves."""

from flax import nnx

state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
zeros = state.map(lambda path, leaf: leaf.replace(leaf.value * 0))  # deprecated
print(zeros["kernel"].value.sum())  # deprecated
