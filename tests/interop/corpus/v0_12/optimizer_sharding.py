"""Optimizer state placed differently from its parameters."""

import jax
import optax
from flax import nnx

mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
with jax.set_mesh(mesh):
    net = nnx.Linear(
        2, 2, kernel_metadata={"optimizer_sharding": ("data", None)}, rngs=nnx.Rngs(0)
    )
    optimizer = nnx.Optimizer(net, optax.adam(0.1), wrt=nnx.Param)
mu = optimizer.opt_state[0].mu["kernel"]
print(type(mu).__name__, mu.out_sharding, net.kernel.get_metadata().get("out_sharding"))
