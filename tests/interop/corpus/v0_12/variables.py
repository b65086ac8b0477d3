"""Variables: refs by `with_vars`, names of `nnx.variablelib`, random streams."""

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx import variablelib

net = nnx.Dict(a=nnx.Param(jnp.ones(1)), b=nnx.BatchStat(jnp.ones(1)))
refs = nnx.with_vars(net, ref=True, only=nnx.Param)
print(refs.a.ref, refs.b.ref, refs.b is net.b)
older = nnx.vars_as(net, ref=True)  # deprecated
print(older.b.ref)
with nnx.var_defaults(ref=True):
    print(nnx.Param(jnp.ones(1)).ref)
print(nnx.var_defaults().ref, variablelib.VariableMetadata is nnx.VariableMetadata)
x = jnp.ones(1)
print(variablelib.is_array_ref(x), variablelib.is_array_ref(jax.new_ref(x)))

rngs = nnx.Rngs(params=0, dropout=1)
print(rngs.split(3).params.key[...].shape)
print(rngs.split({"dropout": 2}).dropout.key[...].shape)
drop = nnx.Dropout(0.5, rngs=rngs)
split = nnx.with_rngs(drop, split=4, graph_updates=False)
print(split.rngs.key[...].shape, drop.rngs.key[...].shape)
backups = nnx.fork_rngs(drop)
print(drop.rngs.count[...])
nnx.restore_rngs(backups)
