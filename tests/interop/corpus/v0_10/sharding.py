"""Annotated parameters: placed, renamed, and under `vmap`."""

import jax
import jax.numpy as jnp
from flax import nnx

nnx.use_eager_sharding(False)
mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
init = nnx.with_partitioning(nnx.initializers.ones_init(), sharding=(None, "model"))


def create(rngs):
    return nnx.Linear(2, 2, kernel_init=init, rngs=rngs)


@nnx.jit
def placed():
    net = create(nnx.Rngs(0))
    state = nnx.state(net)
    specs = nnx.get_partition_spec(state)
    nnx.update(net, jax.lax.with_sharding_constraint(state, specs))
    return net


with jax.set_mesh(mesh):
    net = placed()
print(net.kernel.value.shape, net(jnp.ones((1, 2))).shape)  # deprecated


@nnx.split_rngs(splits=3)
@nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
def stacked(rngs):
    return create(rngs)


layers = stacked(nnx.Rngs(0))
print(nnx.get_partition_spec(nnx.state(layers))["kernel"].value)  # deprecated
print(layers.kernel.value.shape)  # deprecated

v = nnx.Param(jnp.ones((2, 2)), sharding_names=("a", "b"))  # deprecated
print(v.sharding_names, nnx.get_partition_spec({"v": v})["v"].value)  # deprecated
v.set_metadata(sharding=("b", None))  # deprecated
print(v.out_sharding, v.has_metadata("sharding"))
