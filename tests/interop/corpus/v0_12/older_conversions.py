"""Conversions and keywords of 0.12.1 and 0.12.2.

Not in Flax today.
"""

import jax.numpy as jnp
from flax import nnx

net = nnx.Dict(a=nnx.Param(jnp.ones(1)))
refs = nnx.as_ref_vars(net)
arrays = nnx.as_array_vars(refs)
print(refs.a.ref, arrays.a.ref, net.a.ref)
print(nnx.as_hijax_vars(net).a.is_hijax, nnx.as_pytree_vars(refs).a[...])
frozen = nnx.as_immutable_vars(net)
print(nnx.as_mutable_vars(frozen).a[...], nnx.to_lojax(nnx.to_hijax(net)).a[...])
v = nnx.Variable(jnp.array(0), is_hijax=True)
print(v.is_hijax, v.has_ref)
with nnx.use_hijax(True):
    print(nnx.using_hijax(), nnx.Variable(jnp.array(0)).is_hijax)
