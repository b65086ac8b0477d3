"""Variables are placed where their annotation says, under a mesh."""

import jax
from flax import nnx

mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "data"))
with jax.set_mesh(mesh):
    layer = nnx.Linear(2, 2, kernel_init=init, rngs=nnx.Rngs(0))
kernel, bias = layer.kernel, layer.bias
print(kernel.get_value().sharding.spec, bias.get_metadata().get("out_sharding"))
print(nnx.get_named_sharding(nnx.state(layer), mesh)["kernel"].get_value().spec)
