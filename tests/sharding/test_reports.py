"""The report says where arrays are, and what a device holds."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import graftree as nnx


def test_bytes_per_device_are_those_of_the_parts():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    divided = jax.device_put(jnp.zeros((8, 4)), NamedSharding(mesh, P("b", None)))
    copied = jax.device_put(jnp.zeros(3, jnp.int8), NamedSharding(mesh, P()))
    single = jax.device_put(jnp.zeros(5), jax.devices()[3])
    report = nnx.sharding.report({"x": [divided, copied], "y": nnx.Param(single)})
    rows = {row.path: (row.local_shape, row.local_bytes) for row in report.rows}
    assert rows == {"x[0]": ((2, 4), 32), "x[1]": ((3,), 3), "y": ((5,), 20)}
    assert report.num_bytes == 128 + 3 + 20
    assert report.bytes_per_device == 32 + 3 + 20
    held = dict.fromkeys(jax.devices(), 0)
    for array in (divided, copied, single):
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
    assert max(held.values()) == report.bytes_per_device


def test_abstract_models_and_random_keys_are_listed():
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))

    def make():
        metadata = {"out_sharding": (None, "model")}
        linear = nnx.Linear(2, 8, kernel_metadata=metadata, rngs=nnx.Rngs(0))
        return nnx.Sequential(linear, nnx.Dropout(0.5, rngs=nnx.Rngs(0)))

    _, state = nnx.get_abstract_model(make, mesh)
    abstract = nnx.sharding.report(state)
    made = nnx.sharding.report(nnx.sharding.init(make, mesh))
    assert abstract.bytes_per_device == made.bytes_per_device
    assert "layers[0].kernel" in str(made) and "(None, 'model')" in str(made)
    assert "key<fry>[]" in str(made)


def test_a_shared_array_counts_once():
    linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    assert nnx.sharding.report([linear, linear]).num_bytes == 24


def test_a_picture_is_drawn_of_an_array_by_path(capsys):
    report = nnx.sharding.report(nnx.Linear(2, 4, rngs=nnx.Rngs(0)))
    report.draw("kernel")
    assert "CPU 0" in capsys.readouterr().out
    with pytest.raises(KeyError, match="no array at 'weight': bias, kernel"):
        report.draw("weight")
