"""`*_metadata` of layers."""

from flax import nnx

with nnx.use_eager_sharding(False):
    layer = nnx.Linear(
        2,
        3,
        kernel_metadata={"out_sharding": ("a", None)},
        bias_metadata={"tag": "b"},
        rngs=nnx.Rngs(0),
    )
print(layer.kernel.out_sharding, layer.bias.tag)
