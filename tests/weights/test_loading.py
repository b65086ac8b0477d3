"""Loading: all weights or an error; what is loaded and saved is the same file."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from examples.models import pretrained
from tests import tables, zoo
from tests.comparisons import raises
from tests.meshes import mesh_of
from tests.weights import checkpoints_of_hf
from tests.weights.tensors import numbers


def make_block(rngs, **metadata):
    return nnx.Dict(up=nnx.Linear(4, 8, rngs=rngs, **metadata))


def make_list(**metadata):
    rngs = nnx.Rngs(0)
    return nnx.Dict(blocks=nnx.List([make_block(rngs, **metadata) for _ in range(3)]))


def make_stack(**metadata):
    def make(rngs):
        return make_block(rngs, **metadata)

    return nnx.Dict(blocks=nnx.Stack(make, 3, rngs=nnx.Rngs(0)))


TABLE = {"h.{i}.fc": "blocks[{i}].up"}


def make_weights(dtype=np.float32):
    names = {f"h.{i}.fc.weight": numbers(8, 4, dtype=dtype) for i in range(3)}
    return names | {f"h.{i}.fc.bias": numbers(8, dtype=dtype) for i in range(3)}


def kernels(model):
    if isinstance(model.blocks, nnx.Stack):
        return np.asarray(model.blocks.layers.up.kernel[...])
    return np.stack([np.asarray(block.up.kernel[...]) for block in model.blocks])


def expected(weights):
    return np.stack([weights[f"h.{i}.fc.weight"].T for i in range(3)])


@pytest.mark.parametrize("make", [make_list, make_stack])
@pytest.mark.parametrize("abstract", [False, True])
def test_a_list_and_a_stack_are_filled(make, abstract):
    weights = make_weights()
    model = nnx.eval_shape(make) if abstract else make()
    assert nnx.weights.load(weights, model, TABLE) is model
    np.testing.assert_array_equal(kernels(model), expected(weights))


@pytest.mark.parametrize("convert", [nnx.to_refs, lambda model: model])
def test_variables_stay_what_they_are(convert):
    weights, model = make_weights(), convert(make_list())
    kernel = model.blocks[0].up.kernel
    nnx.weights.load(weights, model, TABLE)
    assert model.blocks[0].up.kernel is kernel and type(kernel) is nnx.Param
    np.testing.assert_array_equal(kernels(model), expected(weights))


def make_embed():
    return nnx.Dict(embed=nnx.Embed(5, 2, rngs=nnx.Rngs(0)))


def test_shared_arrays_have_one_line():
    model = make_embed()
    model.same = model.embed
    for path in ("embed", "same"):
        table = numbers(5, 2)
        nnx.weights.load({"w.weight": table}, model, {"w": path})
        np.testing.assert_array_equal(model.embed.embedding, table)


def test_attributes_that_are_arrays_are_filled():
    model = nnx.Dict(a=nnx.data(jnp.zeros(3)))
    nnx.weights.load({"x": np.arange(3, dtype=np.float32)}, model, {"x": "a"})
    np.testing.assert_array_equal(model.a, [0, 1, 2])


# ------------------------------------------------------------------ all or an error


def wrong(change):
    weights, model = make_weights(), make_list()
    change(weights)
    before = kernels(model)
    with pytest.raises(nnx.errors.StateMismatchError) as error:
        nnx.weights.load(weights, model, TABLE)
    np.testing.assert_array_equal(kernels(model), before)
    return error.value


def test_missing_tensors_are_listed():
    error = wrong(lambda weights: [weights.pop(f"h.{i}.fc.bias") for i in (0, 2)])
    assert error.missing == (("blocks", 0, "up", "bias"), ("blocks", 2, "up", "bias"))
    assert "h.2.fc.bias, for blocks[2].up.bias: float32[8]" in str(error)


def test_unexpected_tensors_are_listed():
    error = wrong(lambda weights: weights.update({"h.3.fc.bias": numbers(8)}))
    assert error.unexpected == (("h.3.fc.bias",),) and "ignore=" in str(error)
    assert "h.3.fc.bias: float32[8]\n" in str(error)


def test_shapes_are_compared():
    error = wrong(lambda weights: weights.update({"h.1.fc.weight": numbers(4, 8)}))
    said = "blocks[1].up.kernel: expected shape h.1.fc.weight [8,4], got [4,8]"
    assert said in str(error)


def test_arrays_without_a_line_are_listed():
    model = make_list()
    model["head"] = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    mismatch = pytest.raises(nnx.errors.StateMismatchError, match="not in the table")
    with mismatch as error:
        nnx.weights.load(make_weights(), model, TABLE)
    assert error.value.missing == (("head", "bias"), ("head", "kernel"))
    nnx.weights.load(make_weights(), model, TABLE, missing="head.**")


def test_what_may_be_missing_stays():
    weights = make_weights()
    del weights["h.1.fc.bias"]
    model = make_list()
    nnx.weights.load(weights, model, TABLE, missing="blocks[1].up.bias")
    assert not model.blocks[1].up.bias[...].any()
    assert model.blocks[0].up.bias[...].any()


@pytest.mark.parametrize("make", [make_stack, lambda: nnx.eval_shape(make_list)])
def test_part_of_a_stack_or_an_abstract_array_may_not_be_missing(make):
    weights = make_weights()
    del weights["h.1.fc.bias"]
    with pytest.raises(nnx.errors.StateMismatchError) as error:
        nnx.weights.load(weights, make(), TABLE, missing="**.bias")
    is_abstract = make is not make_stack
    assert ("An abstract array has no value to keep" in str(error.value)) == is_abstract
    assert ("Use missing= for" in str(error.value)) != is_abstract


def test_numbers_that_a_narrower_dtype_can_not_hold_are_refused():
    weights, model = {"x": np.array([1.0, 7e4, np.inf], np.float32)}, nnx.Dict()
    model.x = nnx.Param(jnp.zeros(3))
    with pytest.raises(ValueError, match=r"1 numbers of 'x'(.|\n)*65504(.|\n)*  x"):
        nnx.weights.load(weights, model, {"x": "x"}, dtype=jnp.float16)
    assert not model.x.any()
    nnx.weights.load(weights, model, {"x": "x"}, dtype=jnp.bfloat16)
    assert model.x[1] == jnp.bfloat16(7e4)


def test_ignored_tensors_are_left_out():
    weights = make_weights() | dict.fromkeys(["h.0.inv_freq", "a[0].b"], numbers(3))
    mapping = nnx.weights.Mapping(TABLE, ignore=["**.inv_freq", "a[0].b"])
    nnx.weights.load(weights, make_list(), mapping)


def test_tied_tensors_must_be_equal():
    model, table = make_embed(), numbers(5, 2)
    tied = {"lm_head.weight": "wte.weight"}
    mapping = nnx.weights.Mapping({"wte": "embed"}, tied=tied)
    weights = {"wte.weight": table}
    nnx.weights.load(weights, model, mapping)
    nnx.weights.load(weights | {"lm_head.weight": table}, model, mapping)
    for other in (table, table[:, 0]):
        weights = {"wte.weight": table + 1, "lm_head.weight": other}
        with pytest.raises(ValueError, match="are tied"):
            nnx.weights.load(weights, model, mapping)
    np.testing.assert_array_equal(model.embed.embedding, table)


@tables.cases(
    "tied, reason",
    ({"head.weight": "wte"}, "which no line of the table loads"),
    ({"w.weight": "w.weight"}, "its own array"),
    ids=["misspelt", "itself"],
)
def test_what_a_name_is_tied_to_is_in_the_table(tied, reason):
    """Else it would be dropped without a word."""
    weights = {"w.weight": numbers(5, 2), "head.weight": numbers(5, 2)}
    mapping = nnx.weights.Mapping({"w": "embed"}, tied=tied)
    with pytest.raises(ValueError, match=reason):
        nnx.weights.load(weights, make_embed(), mapping)


# ----------------------------------------------------------------------------- dtypes


HALF, SINGLE = jnp.bfloat16, jnp.float32


@pytest.mark.parametrize("make", [make_list, make_stack])
@tables.cases(
    "given, dtype, kernel, bias",
    (HALF, None, SINGLE, SINGLE),
    (SINGLE, HALF, HALF, HALF),
    (SINGLE, {"**.kernel": HALF}, HALF, SINGLE),
    (HALF, "file", HALF, HALF),
)
def test_dtypes_are_those_of_the_model_or_the_call(make, given, dtype, kernel, bias):
    weights = make_weights(given)
    model = nnx.weights.load(weights, make(), TABLE, dtype=dtype)
    layer = model.blocks.layers if make is make_stack else model.blocks[0]
    assert (layer.up.kernel.dtype, layer.up.bias.dtype) == (kernel, bias)
    np.testing.assert_array_equal(kernels(model), expected(weights).astype(kernel))


def test_each_array_may_have_its_own_dtype_in_the_file():
    weights = make_weights()
    weights |= {f"h.{i}.fc.bias": numbers(8, dtype=np.float16) for i in range(3)}
    model = nnx.weights.load(weights, make_list(), TABLE, dtype="file")
    assert model.blocks[0].up.kernel.dtype == jnp.float32
    assert model.blocks[0].up.bias.dtype == jnp.float16


@tables.cases(
    "given, held, dtype, error, said",
    (SINGLE, HALF, None, nnx.errors.StateMismatchError, "dtype="),
    (np.float64, SINGLE, "file", nnx.errors.StateMismatchError, "float64"),
    (SINGLE, SINGLE, {"**.kernal": HALF}, ValueError, "matches no floating array"),
    (SINGLE, SINGLE, np.float64, ValueError, "jax_enable_x64"),
)
def test_what_loses_precision_or_jax_lacks_is_refused(given, held, dtype, error, said):
    model = make_list(param_dtype=held)
    with pytest.raises(error, match=said):
        nnx.weights.load(make_weights(given), model, TABLE, dtype=dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32])
def test_whole_numbers_are_to_be_converted_first(dtype):
    model = nnx.Dict(a=nnx.Param(jnp.zeros(3, dtype)))
    with pytest.raises(nnx.errors.StateMismatchError) as error:
        nnx.weights.load({"x": np.arange(3)}, model, {"x": "a"})
    assert "convert them first" in str(error.value)
    assert "Use dtype=" not in str(error.value)


# -------------------------------------------------------------------------- shardings


METADATA = {"kernel_metadata": {"out_sharding": ("a", "b")}}


@pytest.mark.parametrize("make", [make_list, make_stack])
def test_abstract_models_go_where_they_are_annotated_to_be(make):
    weights = make_weights()
    with jax.set_mesh(mesh_of(a=2, b=4)):
        model = nnx.eval_shape(lambda: make(**METADATA))
        nnx.weights.load(weights, model, TABLE)
    np.testing.assert_array_equal(kernels(model), expected(weights))
    layer = model.blocks[0] if make is make_list else model.blocks.layers
    assert layer.up.kernel.sharding.spec[-2:] == ("a", "b")


def test_concrete_models_stay_where_they_are():
    with jax.set_mesh(mesh_of(a=2, b=4)):
        model = nnx.jit(lambda: make_list(**METADATA))()
    before = model.blocks[0].up.kernel.sharding
    nnx.weights.load(make_weights(), model, TABLE)
    assert model.blocks[0].up.kernel.sharding == before


EVERYWHERE = jax.NamedSharding(mesh_of(a=2, b=4), jax.P())


def test_shardings_that_are_given():
    weights = make_weights()
    model = nnx.eval_shape(make_list)
    nnx.weights.load(weights, model, TABLE, shardings=EVERYWHERE)
    assert model.blocks[0].up.kernel.sharding == EVERYWHERE
    shardings = nnx.get_named_sharding(nnx.state(model), EVERYWHERE.mesh)
    nnx.weights.load(weights, nnx.eval_shape(make_list), TABLE, shardings=shardings)
    with raises(ValueError, "lacks arrays", "blocks[0].up.kernel"):
        nnx.weights.load(weights, model, TABLE, shardings={"blocks": {}})


def test_a_scalar_is_on_all_devices():
    model = nnx.eval_shape(lambda: nnx.Dict(a=nnx.Param(jnp.array(0.0))))
    weights = {"a": np.array(3, np.float32)}
    nnx.weights.load(weights, model, {"a": "a"}, shardings=EVERYWHERE)
    assert model.a.sharding == EVERYWHERE and float(model.a[...]) == 3


VALUES = np.arange(24 * 4096, dtype=np.float32).reshape(24, 4096)


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    """A file with the tensor ``x``."""
    path = tmp_path_factory.mktemp("values") / "x.safetensors"
    nnx.weights.save(path, nnx.Dict(x=nnx.Param(VALUES)), {"x": "x"})
    return path


def load_divided(path, shape, spec, table, dtype=None):
    """Loads the one array of a model, divided over eight devices."""
    model = nnx.eval_shape(lambda: nnx.Dict(x=nnx.Param(jnp.zeros(shape))))
    sharding = jax.NamedSharding(mesh_of(a=8), jax.P(*spec))
    nnx.weights.load(path, model, table, shardings=sharding, dtype=dtype)
    return model.x.get_value()


@pytest.mark.parametrize("spec", [("a", None), (None, "a"), (None, None)], ids=str)
@pytest.mark.parametrize("layout", ["a b -> a b", "a b -> b a", "a ~b -> b a"])
@pytest.mark.parametrize("dtype", ["file", jnp.bfloat16], ids=str)
def test_each_device_has_its_part(values, spec, layout, dtype):
    expected = VALUES[:, ::-1] if "~" in layout else VALUES
    expected = expected if layout.endswith("a b") else expected.T
    found = load_divided(values, expected.shape, spec, {"x": ("x", layout)}, dtype)
    expected = expected.astype(found.dtype)
    for shard in found.addressable_shards:
        np.testing.assert_array_equal(shard.data, expected[shard.index])


def test_a_stack_is_read_in_the_order_of_the_file():
    layers = {f"h.{i}.w": VALUES + i for i in range(3)}
    table = {"h.{i}.w": ("x", "a b -> b a")}
    found = load_divided(layers, (3, 4096, 24), (None, "a"), table)
    np.testing.assert_array_equal(found, np.stack([x.T for x in layers.values()]))


@tables.cases(
    "table, advice",
    ({"fc": "up"}, "2 of them fit with 'model.' in front of the names"),
    ({"x.model.fc": "up"}, "2 of them fit with 'x.' removed from the names"),
    ids=["longer", "shorter"],
)
def test_names_with_another_prefix_are_told(table, advice):
    weights = {"model.fc.weight": numbers(8, 4), "model.fc.bias": numbers(8)}
    model = nnx.eval_shape(lambda: make_block(nnx.Rngs(0)))
    with raises(nnx.errors.StateMismatchError, advice):
        nnx.weights.load(weights, model, table)


FLOATS = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
FLOATS += ["float8_e8m0fnu", "float16", "bfloat16", "float32"]


@pytest.mark.parametrize("given", FLOATS[:-1])
@pytest.mark.parametrize("held", FLOATS)
def test_a_dtype_is_taken_if_the_model_s_has_all_of_its_numbers(given, held):
    dtype = jnp.dtype(given)
    bits = np.arange(2 ** (8 * dtype.itemsize)).astype(f"uint{8 * dtype.itemsize}")
    values = bits.view(dtype).astype(np.float32)
    values = values[np.isfinite(values)]
    with np.errstate(over="ignore", invalid="ignore"):
        is_exact = (values.astype(jnp.dtype(held)).astype(np.float32) == values).all()
    model = nnx.Dict(x=nnx.Param(jax.device_put(np.zeros(values.shape, held))))
    weights = {"x": values.astype(dtype)}
    if is_exact:
        nnx.weights.load(weights, model, {"x": "x"})
        np.testing.assert_array_equal(np.asarray(model.x[...], np.float32), values)
    else:
        with pytest.raises(nnx.errors.StateMismatchError, match="expected dtype"):
            nnx.weights.load(weights, model, {"x": "x"})


# ------------------------------------------------------------------------------- saving


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


SAVED = {
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
    nnx.weights.save(path, model, SAVED, shard_bytes=shard_bytes)
    again = nnx.weights.load(path, nnx.eval_shape(make), SAVED)
    same = functools.partial(np.testing.assert_array_equal, strict=True)
    jax.tree.map(same, nnx.as_pure(again), nnx.as_pure(model))


def test_arrays_on_many_devices_are_written_whole(tmp_path):
    values = np.arange(32.0, dtype=np.float32).reshape(8, 4)
    divided = jax.device_put(values, jax.NamedSharding(mesh_of(a=8), jax.P("a")))
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
    with raises(ValueError, "leaves out arrays", "a.bias"):
        nnx.weights.save(path, model, {"w": "a.kernel"})
    assert not path.exists()
    nnx.weights.save(path, model, {"w": "a.kernel"}, missing="a.bias")
    nnx.weights.load(path, model, {"w": "a.kernel"}, missing="a.bias")


def test_of_many_left_out_arrays_the_others_are_counted(tmp_path):
    model = nnx.Dict({f"a{k}": nnx.Param(jnp.ones(1)) for k in range(15)})
    with raises(ValueError, "leaves out arrays", "a0", "... and 2 more"):
        nnx.weights.save(tmp_path / "x.safetensors", model, {"w": "a14"})


def test_abstract_models_have_no_weights(tmp_path):
    with pytest.raises(ValueError, match="is abstract"):
        nnx.weights.save(tmp_path / "x", nnx.eval_shape(linear), {"a": "a"})
    assert not any(tmp_path.iterdir())


def test_parts_of_a_tensor_have_one_dtype(tmp_path):
    model = nnx.Dict(a=nnx.Param(jnp.ones(2)), b=nnx.Param(jnp.ones(2, jnp.bfloat16)))
    table = {"x": (["a", "b"], "+f -> f")}
    with pytest.raises(ValueError, match="same dtype"):
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
