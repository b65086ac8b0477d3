"""Annotated parameters placed by `with_sharding_constraint`."""

import jax
import jax.numpy as jnp
from flax import nnx

nnx.use_eager_sharding(False)
mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))


def create():
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
    net = nnx.Linear(2, 4, kernel_init=init, rngs=nnx.Rngs(0))
    state = nnx.state(net)
    nnx.update(
        net, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state))
    )
    return net


with jax.set_mesh(mesh):
    net = nnx.jit(create)()
print(net.kernel.value.shape, net(jnp.ones((1, 2))).shape)  # deprecated
