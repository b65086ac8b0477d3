"""`nnx.update` with several states, and with parts of one."""

import jax.numpy as jnp
from flax import nnx

net = nnx.Dict(
    a=nnx.Linear(1, 1, rngs=nnx.Rngs(0)), b=nnx.Linear(1, 1, rngs=nnx.Rngs(1))
)
part = nnx.State({"a": {"bias": nnx.Param(jnp.array([3.0]))}})
nnx.update(net, part, {"b": {"bias": nnx.Param(jnp.array([4.0]))}})
print(net.a.bias.value, net.b.bias.value)  # deprecated
