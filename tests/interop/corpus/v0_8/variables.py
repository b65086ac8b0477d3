"""Variables: `.value`, hooks, types of one's own, and `VariableState` for leaves."""

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx import filterlib, graph, rnglib, statelib, variablelib

layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
layer.bias.value = jnp.arange(2.0)  # deprecated
layer.kernel.value = layer.kernel.value * 0  # deprecated
print(layer(jnp.ones((1, 2))))
count = nnx.Variable(5)
count.value -= 2  # deprecated
print(count.value)  # deprecated

log = []
v = nnx.Variable(jnp.array(1.0), on_set_value=lambda v, x: (log.append("set"), x)[1])
v.value = jnp.array(2.0)  # deprecated
print(log, v.value)  # deprecated


class Cache(nnx.Variable):
    pass


net = nnx.Dict(w=nnx.Param(jnp.ones(2)), c=Cache(jnp.zeros(2), tag="mine"))
graphdef, caches, rest = nnx.split(net, Cache, ...)
print(list(caches), list(rest), caches["c"].tag)
print(nnx.variable_name_from_type(Cache, allow_register=True))
nnx.register_variable_name("my_kind", type("Kind", (nnx.Variable,), {}))
print(nnx.variable_type_from_name("my_kind").__name__)

state = nnx.state(layer)
zeros = jax.tree.map(
    lambda leaf: leaf.replace(jnp.zeros_like(leaf.value)),  # deprecated
    state,
    is_leaf=lambda x: isinstance(x, nnx.VariableState),  # deprecated
)
print(zeros["bias"].value, type(zeros["kernel"]).__name__)  # deprecated
state = nnx.state(nnx.BatchNorm(2, rngs=nnx.Rngs(0)))
print({name: leaf.type.__name__ for name, leaf in state.items()})
print(state["mean"].var_type is nnx.BatchStat, isinstance(state["scale"], nnx.Param))

leaf = variablelib.VariableState(jnp.ones(2), collection="x")
print(type(leaf).__name__ in ("Variable", "VariableState"), leaf.collection)
print(filterlib.to_predicate(variablelib.Param)(("a",), variablelib.Param(1)))
print(graph.GraphDef.__name__, statelib.State.__name__, rnglib.Rngs.__name__)
