"""Methods of State that are functions now."""

from flax import nnx


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)


state = nnx.state(Block(nnx.Rngs(0)))
params, stats = state.split(nnx.Param, nnx.BatchStat)  # deprecated
print(sorted(params), sorted(stats["norm"]))
only = state.filter(nnx.BatchStat)  # deprecated
both = nnx.State.merge(params, stats)  # deprecated
print(sorted(both["norm"]), sorted(only))
flat = both.flat_state()  # deprecated
print([path for path, _ in flat])
again = nnx.State.from_flat_path({path: value for path, value in flat})  # deprecated
assert sorted(again["linear"]) == ["bias", "kernel"]
