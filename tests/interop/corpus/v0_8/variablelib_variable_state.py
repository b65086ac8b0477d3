"""`variablelib.VariableState` and sub-modules of that time."""

import jax.numpy as jnp
from flax.nnx import filterlib, graph, rnglib, statelib, variablelib

leaf = variablelib.VariableState(jnp.ones(2), collection="x")
print(type(leaf).__name__ in ("Variable", "VariableState"), leaf.collection)
print(filterlib.to_predicate(variablelib.Param)(("a",), variablelib.Param(1)))
print(graph.GraphDef.__name__, statelib.State.__name__, rnglib.Rngs.__name__)
