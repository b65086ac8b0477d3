"""`with_vars`, and its older names."""

import jax.numpy as jnp
from flax import nnx

net = nnx.Dict(a=nnx.Param(jnp.ones(1)), b=nnx.BatchStat(jnp.ones(1)))
refs = nnx.with_vars(net, ref=True, only=nnx.Param)
print(refs.a.ref, refs.b.ref, refs.b is net.b)
older = nnx.vars_as(net, ref=True)  # deprecated
print(older.b.ref)
with nnx.var_defaults(ref=True):
    print(nnx.Param(jnp.ones(1)).ref)
