"""Transforms of Linen rename the axes of a Module inside of them (google/flax#5589)."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import graftree as nnx

LAYERS = 3


class Block(nn.Module):
    """A layer that Linen repeats, with annotations for two axes."""

    @nn.compact
    def __call__(self, x, _):
        layer = nnx.bridge.to_linen(
            nnx.Linear,
            4,
            4,
            kernel_metadata={
                "out_sharding": ("in", "out"),
                "roles": ("read", "write"),
                "tag": "first",
            },
            bias_metadata={"out_sharding": ("out",)},
            name="layer",
        )
        return layer(x), None


def repeated(transform, axis, names):
    options = {
        "variable_axes": {"params": axis},
        "split_rngs": {"params": True},
        "metadata_params": names,
    }
    if transform is nn.scan:
        return nn.scan(Block, length=LAYERS, **options)()
    return nn.vmap(Block, in_axes=(0, None), axis_size=LAYERS, **options)()


@pytest.mark.parametrize("transform", [nn.scan, nn.vmap])
@pytest.mark.parametrize("axis", [0, 1])
def test_an_axis_of_layers_is_named_where_it_is(transform, axis):
    model = repeated(transform, axis, {nn.PARTITION_NAME: "layers", "roles": "repeat"})
    x = jnp.ones((LAYERS, 4))
    with nnx.use_eager_sharding(False):
        variables = model.init(jax.random.key(0), x, None)
        kernel = variables["params"]["layer"]["kernel"]
        # Inside they are as they were: the axis is taken out again.
        out, _ = model.apply(variables, x, None)
    names, roles = ["in", "out"], ["read", "write"]
    names.insert(axis, "layers")
    roles.insert(axis, "repeat")
    assert nn.get_partition_spec(variables)["params"]["layer"]["kernel"] == P(*names)
    assert kernel.metadata["roles"] == tuple(roles)
    assert kernel.metadata["tag"] == "first"
    assert len(names) == kernel.value.ndim and kernel.value.shape[axis] == LAYERS
    assert out.shape == x.shape


def test_without_a_name_the_axis_has_none():
    model = repeated(nn.scan, 0, {})
    with nnx.use_eager_sharding(False):
        variables = model.init(jax.random.key(0), jnp.ones((2, 4)), None)
    specs = nn.get_partition_spec(variables)["params"]["layer"]
    assert specs == {"kernel": P(None, "in", "out"), "bias": P(None, "out")}
