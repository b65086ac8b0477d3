"""split_state, filter_state, merge_state, map_state."""

from flax import nnx


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)


state = nnx.state(Net(nnx.Rngs(0)))
params, rest = nnx.split_state(state, nnx.Param, ...)
stats = nnx.filter_state(state, nnx.BatchStat)
print(sorted(rest["norm"]), sorted(stats["norm"]))
print(sorted(nnx.merge_state(params, rest)["norm"]))
names = nnx.map_state(lambda path, v: "/".join(map(str, path)), params)
print(names["linear"]["kernel"])
