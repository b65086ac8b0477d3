"""Saving: what is loaded and saved again is the same file, byte for byte."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from examples.models import pretrained
from tests import tables, zoo
from tests.weights import checkpoints_of_hf
from tests.weights.tensors import mesh


@tables.cases("name, shard_bytes", ("llama", None), ("gpt2", None), ("qwen3", 60_000))
def test_files_of_hugging_face_come_back_byte_for_byte(name, shard_bytes, tmp_path):
    folder = checkpoints_of_hf.folder(name)
    make, weights = pretrained.family(json.loads((folder / "config.json").read_text()))
    model = nnx.weights.load(folder, nnx.eval_shape(make), weights)
    nnx.weights.save(tmp_path, model, weights, shard_bytes=shard_bytes)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert written == {path.name: path.read_bytes() for path in folder.glob("model*")}


def make():
    def linear(rngs):
        return nnx.Linear(3, 5, param_dtype=jnp.bfloat16, rngs=rngs)

    rngs = nnx.Rngs(0)
    qkv = [nnx.Linear(4, size, use_bias=False, rngs=rngs) for size in (6, 2, 2)]
    return zoo.Box(
        qkv=nnx.List(qkv),
        blocks=nnx.Stack(linear, 2, rngs=rngs),
        flag=nnx.Param(jnp.array([True, False])),
        count=nnx.Param(jnp.arange(3, dtype=jnp.int32)),
        scale=nnx.Param(jnp.array(0.5)),
    )


TABLE = {
    "qkv": ([f"qkv[{i}].kernel" for i in range(3)], "+o i -> i o"),
    "h.{i}": "blocks[{i}]",
    "flag": "flag",
    "count": "count",
    "scale": "scale",
}


@pytest.mark.parametrize("shard_bytes", [None, 64])
def test_fused_stacked_and_mixed_dtypes_come_back(shard_bytes, tmp_path):
    model = nnx.jit(make)()
    path = tmp_path / "set" if shard_bytes else tmp_path / "x.safetensors"
    nnx.weights.save(path, model, TABLE, shard_bytes=shard_bytes)
    again = nnx.weights.load(path, nnx.eval_shape(make), TABLE)
    same = functools.partial(np.testing.assert_array_equal, strict=True)
    jax.tree.map(same, nnx.as_pure(again), nnx.as_pure(model))


def test_arrays_on_many_devices_are_written_whole(tmp_path):
    values = np.arange(32.0, dtype=np.float32).reshape(8, 4)
    divided = jax.device_put(values, jax.NamedSharding(mesh(a=8), jax.P("a")))
    path = tmp_path / "x.safetensors"
    nnx.weights.save(path, nnx.Dict(x=nnx.Param(divided)), {"x": "x"})
    model = nnx.eval_shape(lambda: nnx.Dict(x=nnx.Param(jnp.zeros((8, 4)))))
    nnx.weights.load(path, model, {"x": "x"})
    np.testing.assert_array_equal(model.x, values)


def linear():
    return nnx.Dict(a=nnx.Linear(2, 3, rngs=nnx.Rngs(0)))


def test_left_out_arrays_are_refused(tmp_path):
    model = linear()
    path = tmp_path / "x.safetensors"
    with pytest.raises(ValueError, match="leaves out arrays") as error:
        nnx.weights.save(path, model, {"w": "a.kernel"})
    assert "a.bias" in str(error.value)
    assert not path.exists()
    nnx.weights.save(path, model, {"w": "a.kernel"}, missing="a.bias")
    nnx.weights.load(path, model, {"w": "a.kernel"}, missing="a.bias")


def test_abstract_models_have_no_weights(tmp_path):
    with pytest.raises(ValueError, match="is abstract"):
        nnx.weights.save(tmp_path / "x", nnx.eval_shape(linear), {"a": "a"})
    assert not any(tmp_path.iterdir())


def test_parts_of_a_tensor_have_one_dtype(tmp_path):
    model = nnx.Dict(a=nnx.Param(jnp.ones(2)), b=nnx.Param(jnp.ones(2, jnp.bfloat16)))
    table = {"x": (["a", "b"], "+f -> f")}
    with pytest.raises(ValueError, match="one dtype"):
        nnx.weights.save(tmp_path / "x.safetensors", model, table)


def test_tied_names_are_not_written(tmp_path):
    model = nnx.Dict(embed=nnx.Embed(5, 2, rngs=nnx.Rngs(0)))
    mapping = nnx.weights.Mapping({"w": "embed"}, tied={"head.weight": "w.weight"})
    nnx.weights.save(tmp_path / "x.safetensors", model, mapping)
    nnx.weights.load(tmp_path / "x.safetensors", model, {"w": "embed"})


@pytest.mark.parametrize("line", ["key", "", "keys"])
def test_random_keys_are_refused_with_the_way_to_store_them(tmp_path, line):
    model = nnx.Dict(
        part=nnx.Dict(key=nnx.Variable(jax.random.key(0)), up=nnx.Param(jnp.ones(2))),
        keys=jax.random.split(jax.random.key(0)),
    )
    mapping = {"x": {"key": "part.key", "": "part", "keys": "keys"}[line]}
    path = tmp_path / "a.safetensors"
    with pytest.raises(ValueError, match=r"is a random key.*jax\.random\.key_data"):
        nnx.weights.save(path, model, mapping)
    with pytest.raises(ValueError, match="is a random key"):
        nnx.weights.load({"x": np.ones(2)}, model, mapping)
    assert not path.exists()
    nnx.weights.save(path, model, {"up": "part.up"}, missing=["**.key", "keys"])
