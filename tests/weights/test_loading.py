"""Loading: all weights or an error, each where it belongs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx

rng = np.random.default_rng(0)


def normal(*shape, dtype=np.float32):
    return rng.normal(size=shape).astype(dtype)


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
    names = {f"h.{i}.fc.weight": normal(8, 4, dtype=dtype) for i in range(3)}
    return names | {f"h.{i}.fc.bias": normal(8, dtype=dtype) for i in range(3)}


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


def test_variables_stay_what_they_are():
    model = make_list()
    kernel = model.blocks[0].up.kernel
    nnx.weights.load(make_weights(), model, TABLE)
    assert model.blocks[0].up.kernel is kernel
    assert type(kernel) is nnx.Param


def test_shared_arrays_have_one_line():
    embed = nnx.Embed(5, 2, rngs=nnx.Rngs(0))
    model = nnx.Dict(a=embed, b=embed)
    weights = {"w.weight": normal(5, 2)}
    for table in ({"w": "a"}, {"w": "b"}):
        nnx.weights.load(weights, model, table)
        np.testing.assert_array_equal(model.b.embedding, weights["w.weight"])


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
    error = wrong(lambda weights: weights.update({"h.3.fc.bias": normal(8)}))
    assert error.unexpected == (("h.3.fc.bias",),)
    assert "ignore=" in str(error)


def test_shapes_are_compared():
    error = wrong(lambda weights: weights.update({"h.1.fc.weight": normal(4, 8)}))
    assert "blocks[1].up.kernel: expected shape h.1.fc.weight [8,4], got [4,8]" in str(
        error
    )


def test_arrays_without_a_line_are_listed():
    model = make_list()
    model["head"] = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    with pytest.raises(
        nnx.errors.StateMismatchError, match="not in the table"
    ) as error:
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


def test_part_of_a_stacked_array_may_not_be_missing():
    weights = make_weights()
    del weights["h.1.fc.bias"]
    with pytest.raises(nnx.errors.StateMismatchError):
        nnx.weights.load(weights, make_stack(), TABLE, missing="**.bias")


def test_an_abstract_array_may_not_be_missing():
    weights = make_weights()
    del weights["h.1.fc.bias"]
    with pytest.raises(nnx.errors.StateMismatchError):
        nnx.weights.load(weights, nnx.eval_shape(make_list), TABLE, missing=...)


def test_ignored_tensors_are_left_out():
    weights = make_weights() | {"h.0.rope.inv_freq": normal(3)}
    mapping = nnx.weights.Mapping(TABLE, ignore=["**.inv_freq"])
    nnx.weights.load(weights, make_list(), mapping)


def test_tied_tensors_must_be_equal():
    model = nnx.Dict(embed=nnx.Embed(5, 2, rngs=nnx.Rngs(0)))
    mapping = nnx.weights.Mapping(
        {"wte": "embed"}, tied={"lm_head.weight": "wte.weight"}
    )
    table = normal(5, 2)
    nnx.weights.load({"wte.weight": table}, model, mapping)
    nnx.weights.load({"wte.weight": table, "lm_head.weight": table}, model, mapping)
    before = np.asarray(model.embed.embedding)
    with pytest.raises(ValueError, match="are tied"):
        nnx.weights.load(
            {"wte.weight": table + 1, "lm_head.weight": table}, model, mapping
        )
    np.testing.assert_array_equal(model.embed.embedding, before)


def test_a_tied_tensor_of_another_shape_is_not_equal():
    model = nnx.Dict(embed=nnx.Embed(5, 2, rngs=nnx.Rngs(0)))
    mapping = nnx.weights.Mapping({"w": "embed"}, tied={"head": "w.weight"})
    with pytest.raises(ValueError, match="are tied"):
        nnx.weights.load({"w.weight": normal(5, 2), "head": normal(5)}, model, mapping)


@pytest.mark.parametrize(
    ("tied", "reason"),
    [
        ({"head.weight": "wte"}, "to which no line leads"),
        ({"w.weight": "w.weight"}, "an array of its own"),
    ],
    ids=["misspelt", "itself"],
)
def test_what_a_name_is_tied_to_is_in_the_table(tied, reason):
    """Else it would be dropped without a word."""
    model = nnx.Dict(embed=nnx.Embed(5, 2, rngs=nnx.Rngs(0)))
    weights = {"w.weight": normal(5, 2), "head.weight": normal(5, 2)}
    mapping = nnx.weights.Mapping({"w": "embed"}, tied=tied)
    with pytest.raises(ValueError, match=reason):
        nnx.weights.load(weights, model, mapping)


@pytest.mark.parametrize("make", [nnx.to_refs, lambda model: model])
def test_refs_are_filled_like_arrays(make):
    weights, model = make_weights(), make(make_list())
    nnx.weights.load(weights, model, TABLE)
    np.testing.assert_array_equal(kernels(model), expected(weights))


# ----------------------------------------------------------------------------- dtypes


HALF, SINGLE = jnp.bfloat16, jnp.float32


@pytest.mark.parametrize("make", [make_list, make_stack])
@pytest.mark.parametrize(
    ("given", "dtype", "kernel", "bias"),
    [
        (HALF, None, SINGLE, SINGLE),
        (SINGLE, HALF, HALF, HALF),
        (SINGLE, {"**.kernel": HALF}, HALF, SINGLE),
        (HALF, "file", HALF, HALF),
    ],
)
def test_dtypes_are_those_of_the_model_or_the_call(make, given, dtype, kernel, bias):
    weights = make_weights(given)
    model = nnx.weights.load(weights, make(), TABLE, dtype=dtype)
    layer = model.blocks.layers if make is make_stack else model.blocks[0]
    assert (layer.up.kernel.dtype, layer.up.bias.dtype) == (kernel, bias)
    np.testing.assert_array_equal(kernels(model), expected(weights).astype(kernel))


def test_each_array_may_have_its_own_dtype_in_the_file():
    weights = make_weights()
    weights |= {f"h.{i}.fc.bias": normal(8, dtype=np.float16) for i in range(3)}
    model = nnx.weights.load(weights, make_list(), TABLE, dtype="file")
    assert model.blocks[0].up.kernel.dtype == jnp.float32
    assert model.blocks[0].up.bias.dtype == jnp.float16


@pytest.mark.parametrize(
    ("given", "held", "dtype", "error", "said"),
    [
        (SINGLE, HALF, None, nnx.errors.StateMismatchError, "dtype="),
        (np.float64, SINGLE, "file", nnx.errors.StateMismatchError, "float64"),
        (SINGLE, SINGLE, {"**.kernal": HALF}, ValueError, "matches no floating array"),
        (SINGLE, SINGLE, np.float64, ValueError, "jax_enable_x64"),
    ],
)
def test_what_loses_precision_or_is_no_dtype_of_jax_is_refused(
    given, held, dtype, error, said
):
    model = make_list(param_dtype=held)
    with pytest.raises(error, match=said):
        nnx.weights.load(make_weights(given), model, TABLE, dtype=dtype)


def test_integers_do_not_become_numbers():
    model = nnx.Dict(a=nnx.Param(jnp.ones(3)))
    with pytest.raises(nnx.errors.StateMismatchError):
        nnx.weights.load({"x": np.arange(3)}, model, {"x": "a"})


# -------------------------------------------------------------------------- shardings


@pytest.fixture
def mesh():
    return jax.make_mesh(
        (2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )


METADATA = {"kernel_metadata": {"out_sharding": ("a", "b")}}


@pytest.mark.parametrize("make", [make_list, make_stack])
def test_abstract_models_go_where_they_are_annotated_to_be(make, mesh):
    weights = make_weights()
    with jax.set_mesh(mesh):
        model = nnx.eval_shape(lambda: make(**METADATA))
        nnx.weights.load(weights, model, TABLE)
    np.testing.assert_array_equal(kernels(model), expected(weights))
    layer = model.blocks[0] if make is make_list else model.blocks.layers
    spec = layer.up.kernel.sharding.spec
    assert spec[-2:] == ("a", "b")


def test_concrete_models_stay_where_they_are(mesh):
    with jax.set_mesh(mesh):
        model = make_list(**METADATA)
    before = model.blocks[0].up.kernel.sharding
    nnx.weights.load(make_weights(), model, TABLE)
    assert model.blocks[0].up.kernel.sharding == before


def test_shardings_that_are_given(mesh):
    weights = make_weights()
    model = nnx.eval_shape(make_list)
    everywhere = jax.NamedSharding(mesh, jax.P())
    nnx.weights.load(weights, model, TABLE, shardings=everywhere)
    assert model.blocks[0].up.kernel.sharding == everywhere
    shardings = nnx.get_named_sharding(nnx.state(model), mesh)
    nnx.weights.load(weights, nnx.eval_shape(make_list), TABLE, shardings=shardings)
    with pytest.raises(ValueError, match="lacks arrays") as error:
        nnx.weights.load(weights, model, TABLE, shardings={"blocks": {}})
    assert "blocks[0].up.kernel" in str(error.value)


def test_a_scalar_is_on_all_devices(mesh):
    model = nnx.eval_shape(lambda: nnx.Dict(a=nnx.Param(jnp.array(0.0))))
    everywhere = jax.NamedSharding(mesh, jax.P())
    weights = {"a": np.array(3, np.float32)}
    nnx.weights.load(weights, model, {"a": "a"}, shardings=everywhere)
    assert model.a.shape == ()
    assert float(model.a[...]) == 3


VALUES = np.arange(24 * 4096, dtype=np.float32).reshape(24, 4096)


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    """A file with the tensor ``x``."""
    path = tmp_path_factory.mktemp("values") / "x.safetensors"
    nnx.weights.save(path, nnx.Dict(x=nnx.Param(VALUES)), {"x": "x"})
    return path


def load_divided(path, shape, spec, table, dtype=None):
    """Loads the one array of a model, divided over eight devices."""
    eight = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    model = nnx.eval_shape(lambda: nnx.Dict(x=nnx.Param(jnp.zeros(shape))))
    sharding = jax.NamedSharding(eight, jax.P(*spec))
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


@pytest.mark.parametrize(
    ("table", "advice"),
    [
        ({"fc": "up"}, "2 of them fit with 'model.' in front of the names"),
        ({"x.model.fc": "up"}, "2 of them fit with 'x.' taken off the names"),
    ],
    ids=["longer", "shorter"],
)
def test_names_with_another_prefix_are_told(table, advice):
    weights = {"model.fc.weight": normal(3, 2), "model.fc.bias": normal(3)}
    model = nnx.Dict(up=nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    with pytest.raises(nnx.errors.StateMismatchError) as error:
        nnx.weights.load(weights, model, table)
    assert advice in str(error.value)


def test_whole_numbers_are_not_told_to_convert_by_dtype():
    model = nnx.Dict(count=nnx.Variable(jnp.zeros(3, jnp.int32)))
    with pytest.raises(nnx.errors.StateMismatchError) as error:
        nnx.weights.load({"n": np.arange(3)}, model, {"n": "count"})
    assert "convert them first" in str(error.value)
    assert "dtype= says" not in str(error.value)


FLOATS = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
FLOATS += ["float8_e8m0fnu", "float16", "bfloat16", "float32"]


@pytest.mark.parametrize("given", FLOATS[:-1])
@pytest.mark.parametrize("held", FLOATS)
def test_a_dtype_is_taken_if_the_model_s_has_all_of_its_numbers(given, held):
    dtype = jnp.dtype(given)
    bits = np.arange(2 ** (8 * dtype.itemsize)).astype(f"uint{8 * dtype.itemsize}")
    numbers = bits.view(dtype).astype(np.float32)
    numbers = numbers[np.isfinite(numbers)]
    with np.errstate(over="ignore", invalid="ignore"):
        is_exact = (numbers.astype(jnp.dtype(held)).astype(np.float32) == numbers).all()
    model = nnx.Dict(x=nnx.Param(jnp.zeros(numbers.shape, held)))
    weights = {"x": numbers.astype(dtype)}
    if is_exact:
        nnx.weights.load(weights, model, {"x": "x"})
        np.testing.assert_array_equal(np.asarray(model.x[...], np.float32), numbers)
    else:
        with pytest.raises(nnx.errors.StateMismatchError, match="expected dtype"):
            nnx.weights.load(weights, model, {"x": "x"})
