"""States: by attributes and filters, joined, taken apart, and as pure dicts."""

import jax
import jax.numpy as jnp
from flax import nnx

one, two = nnx.Param(jnp.array(1.0)), nnx.Param(jnp.array(2.0))
state = nnx.State({"a": {"b": one}, "c": two})
state.a.b.value = jnp.array(5.0)  # deprecated
print(state.a.b.value, "a" in state, hasattr(state, "z"), len(state))  # deprecated
state.d = nnx.Param(jnp.array(7.0))
print(sorted(state.keys()), state["d"].value)  # deprecated
del state["c"]
print(sorted(state))

a, b = nnx.State({"x": one, "y": two}), nnx.State({"y": state.d})
print(sorted(a | b), (a | b)["y"].value)  # deprecated
print(sorted(a - b))  # deprecated

block = nnx.Dict(
    linear=nnx.Linear(2, 2, rngs=nnx.Rngs(0)), norm=nnx.BatchNorm(2, rngs=nnx.Rngs(0))
)
state = nnx.state(block)
params, stats = state.split(nnx.Param, nnx.BatchStat)  # deprecated
print(sorted(params), sorted(stats["norm"]))
only = state.filter(nnx.BatchStat)  # deprecated
both = nnx.State.merge(params, stats)  # deprecated
print(sorted(both["norm"]), sorted(only))
flat = both.flat_state()  # deprecated
print([path for path, _ in flat])
again = nnx.State.from_flat_path({path: value for path, value in flat})  # deprecated
print(sorted(again["linear"]))
zeros = params.map(lambda path, leaf: leaf.replace(leaf.value * 0))  # deprecated
print(zeros["linear"]["kernel"].value.sum())  # deprecated

# Pure dicts, by methods and by functions; a list's keys may be strings.
net = nnx.Sequential(block.linear, nnx.relu, nnx.Linear(2, 2, rngs=nnx.Rngs(1)))
graphdef, state = nnx.split(net)
pure = state.to_pure_dict()  # deprecated
print(type(pure["layers"][0]["kernel"]).__name__ != "Param", sorted(pure))
doubled = jax.tree.map(lambda x: x * 2, pure)
state.replace_by_pure_dict(doubled)  # deprecated
nnx.update(net, state)
print(jnp.allclose(net.layers[0].kernel[...], doubled["layers"][0]["kernel"]))
pure = nnx.to_pure_dict(state)
strings = {"layers": {str(k): v for k, v in pure["layers"].items()}}
restored = nnx.restore_int_paths(strings)
print(sorted(restored["layers"]))
nnx.replace_by_pure_dict(state, restored)
print(nnx.merge(graphdef, state)(jnp.ones((1, 2))).shape)

# `nnx.update` with several states, and with parts of one.
part = nnx.State({"linear": {"bias": nnx.Param(jnp.array([3.0, 3.0]))}})
nnx.update(block, part, {"norm": {"bias": nnx.Param(jnp.array([4.0, 4.0]))}})
print(block.linear.bias.value, block.norm.bias.value)  # deprecated
