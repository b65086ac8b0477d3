"""Axis names come and go with `vmap`."""

from flax import nnx

nnx.use_eager_sharding(False)


@nnx.split_rngs(splits=3)
@nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
def create(rngs):
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("in", "out"))
    return nnx.Linear(2, 4, kernel_init=init, rngs=rngs)


layer = create(nnx.Rngs(0))
print(nnx.get_partition_spec(nnx.state(layer))["kernel"].value)  # deprecated
print(layer.kernel.value.shape)  # deprecated
