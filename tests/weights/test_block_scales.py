"""MXFP4 and float8 with scales by block, decoded while loading, as the formats say.

The decoding was compared with that of transformers 5.24 (`convert_moe_packed_tensors`,
all 256 bytes times all 255 scales, and `Fp8Dequantize`): no bit differs. Only where
blocks are cut off at an end, `Fp8Dequantize` raises, or takes smaller blocks.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import graftree as nnx
from tests import meshes, tables
from tests.comparisons import raises
from tests.weights.tensors import float8, mxfp4, numbers


def plain(name, *shape):
    values = numbers(*shape)
    return {name: values}, values


def array(*shape, dtype=jnp.float32):
    return nnx.Param(jnp.zeros(shape, dtype))


def assert_equal(a, b):
    np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64))


# ------------------------------------------------------------------------- the formats


def test_mxfp4_fills_what_the_plain_tensor_fills():
    file, values = mxfp4("x", 2, 6, 64)
    model = nnx.Dict(x=array(2, 64, 6, dtype=jnp.bfloat16))
    nnx.weights.load(file, model, {"x": "x"})
    assert_equal(model.x[...], values)
    nnx.weights.load({"x": values.astype(jnp.bfloat16)}, model, {"x": "x"})
    assert_equal(model.x[...], values)


@tables.cases(
    "shape, block, dtype",
    ((256, 384), (128, 128), np.float32),
    ((200, 129), (128, 128), np.float32),
    ((64, 32), (128, 128), np.float32),
    ((3, 130, 256), (128, 128), jnp.bfloat16),
    ((6, 96), (1, 32), jnp.float8_e8m0fnu),
    ((576, 64), (128, 128), np.float16),
)
def test_blocks_of_float8_may_be_cut_off_and_scales_of_any_dtype(shape, block, dtype):
    file, values = float8("x", *shape, block=block, dtype=dtype)
    model = nnx.weights.load(file, nnx.Dict(x=array(*shape)), {"x": "x"})
    assert_equal(model.x[...], values)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_is_for_the_whole_tensor(shape):
    file, _ = float8("x", 5, 7)
    file["x_scale_inv"] = np.full(shape, 3, np.float32)
    model = nnx.weights.load(file, nnx.Dict(x=array(5, 7)), {"x": "x"})
    assert_equal(model.x[...], file["x"].astype(np.float32) * 3)


def test_bytes_as_scales_are_exponents():
    file, _ = float8("x", 2, 64, block=(1, 32))
    file["x_scale_inv"] = np.array([[127, 129], [126, 0]], np.uint8)
    model = nnx.weights.load(file, nnx.Dict(x=array(2, 64)), {"x": "x"})
    factors = np.repeat([[1, 4], [0.5, 2.0**-127]], 32, axis=-1)
    assert_equal(model.x[...], np.float32(file["x"] * factors))


# ----------------------------------------------------------------------- in all places


def experts(rngs, **metadata):
    return nnx.Dict(up=nnx.Param(jnp.zeros((2, 64, 6), jnp.bfloat16), **metadata))


def test_elements_of_lists_and_stacks_have_their_own():
    files, values = zip(*[mxfp4(f"h.{i}.up", 2, 6, 64) for i in range(3)], strict=True)
    file = {name: x for file in files for name, x in file.items()}
    rngs = nnx.Rngs(0)
    kinds = {
        "list": nnx.List([experts(rngs) for _ in range(3)]),
        "stack": nnx.Stack(experts, 3, rngs=rngs),
        "pattern": nnx.Stack([experts, experts], 3, rngs=rngs),
        "abstract": nnx.eval_shape(lambda: nnx.Stack(experts, 3, rngs=nnx.Rngs(0))),
    }
    for blocks in kinds.values():
        model = nnx.weights.load(file, nnx.Dict(b=blocks), {"h.{i}.up": "b[{i}].up"})
        for i in range(3):
            assert_equal(model.b[i].up[...], values[i])


LAYOUTS = {
    "as in the file": ("x", None, (4, 64, 12)),
    "transposed": ("x", "e i o -> e o i", (4, 12, 64)),
    "interleaved": (["x", "y"], "e i (o part) -> e i o", (4, 64, 6)),
    "halves": (["x", "y"], "e i +o -> e i o", (4, 64, 6)),
    "heads": ("x", "e i (h d) -> e h d i", (4, 3, 4, 64), {"h": 3}),
    "reversed": ("x", "e ~i o -> i e o", (64, 4, 12)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", [mxfp4, float8, plain])
@pytest.mark.parametrize("spec", [None, 0, 1, 2])
def test_layouts_and_parts_of_devices_are_those_of_the_plain_tensor(
    layout, make, spec, tmp_path
):
    shape = (4, 12, 64) if make is mxfp4 else (4, 64, 12)
    file, values = make("x", *shape)
    save_file(file, tmp_path / "x.safetensors")
    line, text, ours, *_ = LAYOUTS[layout]
    line = line if text is None else (line, text, {}) if len(ours) < 4 else (line, text)
    expected = {"x": values.astype(np.float32)}
    models = []
    for source in (tmp_path / "x.safetensors", expected):
        model = nnx.eval_shape(lambda: nnx.Dict(x=array(*ours), y=array(*ours)))
        options = {"missing": []}
        if not isinstance(line, tuple) or line[0] == "x":
            model = nnx.eval_shape(lambda: nnx.Dict(x=array(*ours)))
        if spec is not None:
            if ours[spec] % 2:
                spec -= 1
            sizes = dict.fromkeys("ab" if ours[spec] % 4 == 0 else "a", 2)
            mesh = meshes.mesh_of(**sizes)
            entries = [None] * len(ours)
            entries[spec] = tuple(sizes)
            options["shardings"] = jax.NamedSharding(mesh, jax.P(*entries))
        models.append(nnx.weights.load(source, model, {"x": line}, **options))
    jax.tree.map(assert_equal, *[nnx.as_pure(nnx.state(model)) for model in models])


def test_dtypes_are_those_of_the_model_or_the_call_and_save_writes_plain_numbers(
    tmp_path,
):
    file, values = float8("x", 130, 130)
    table, model = {"x": "x"}, nnx.Dict(x=array(130, 130, dtype=jnp.bfloat16))
    with pytest.raises(nnx.errors.StateMismatchError, match=r"float32(?s:.)*dtype="):
        nnx.weights.load(file, model, table)
    assert not model.x[...].any()
    nnx.weights.load(file, model, table, dtype=jnp.bfloat16)
    assert_equal(model.x[...], values.astype(jnp.bfloat16))
    nnx.weights.load(file, model, table, dtype="file")
    assert model.x.dtype == jnp.float32
    nnx.weights.save(tmp_path / "x.safetensors", model, table)
    written = load_file(tmp_path / "x.safetensors")
    assert {name: x.dtype.name for name, x in written.items()} == {"x": "float32"}


def test_a_table_that_names_codes_and_scales_gets_them_as_they_are():
    file, _ = float8("x", 130, 130)
    model = nnx.Dict(x=array(130, 130, dtype=jnp.float8_e4m3fn), s=array(2, 2))
    nnx.weights.load(file, model, {"x": "x", "x_scale_inv": "s"})
    assert_equal(model.x[...], file["x"])
    file, _ = mxfp4("x", 1, 2, 32)
    model = nnx.Dict(
        x=array(1, 2, 1, 16, dtype=jnp.uint8), s=array(1, 2, 1, dtype=jnp.uint8)
    )
    nnx.weights.load(file, model, {"x_blocks": "x", "x_scales": "s"})
    assert_equal(model.x[...], file["x_blocks"])


def test_drafts_name_the_decoded_tensor():
    file = mxfp4("a.x", 2, 6, 64)[0] | float8("b.weight", 130, 64)[0]
    model = nnx.Dict(
        x=array(2, 64, 6), b=nnx.Linear(64, 130, use_bias=False, rngs=nnx.Rngs(0))
    )
    assert nnx.weights.draft(file, model).entries == {"a.x": "x", "b": "b"}


# -------------------------------------------------------------------------- config.json


def with_config(folder, file, config):
    save_file(file, folder / "model.safetensors")
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "config.json").write_text(text)
    return nnx.weights.load(folder, nnx.Dict(x=array(200, 200)), {"x": "x"})


def test_config_json_says_the_size_of_blocks(tmp_path):
    file, values = float8("x", 200, 200, block=(100, 100))
    config = {"quantization_config": {"weight_block_size": [100, 100]}}
    assert_equal(with_config(tmp_path, file, config).x[...], values)
    file, values = float8("x", 200, 200)
    for config in ({}, {"quantization_config": {"weight_block_size": None}}):
        assert_equal(with_config(tmp_path, file, config).x[...], values)


def test_one_block_is_too_few_if_config_json_says_so(tmp_path):
    file = float8("x", 200, 200, block=(256, 256))[0]
    config = {"quantization_config": {"weight_block_size": [128, 128]}}
    with pytest.raises(nnx.errors.WeightsError, match="1 blocks of 128 by config"):
        with_config(tmp_path, file, config)
    file["x_scale_inv"] = np.float32(3).reshape(1)
    found = with_config(tmp_path, file, config).x[...]
    assert_equal(found, file["x"].astype(np.float32) * 3)


@tables.cases(
    "config, words",
    (
        {"quantization_config": {"weight_block_size": [64, 64]}},
        "2 blocks of 64 by config",
    ),
    ({"quantization_config": {"weight_block_size": [0, 1]}}, r"is \[0, 1\]"),
    ("{", "not JSON"),
)
def test_a_config_that_does_not_fit_is_an_error(config, words, tmp_path):
    with pytest.raises(nnx.errors.WeightsError, match=words):
        with_config(tmp_path, float8("x", 200, 200)[0], config)


# ----------------------------------------------------------------------------- refusals


def without(file, name):
    return {key: x for key, x in file.items() if key != name}


FP8, MX = float8("x", 130, 130)[0], mxfp4("x", 2, 6, 64)[0]


@tables.cases(
    "file, words",
    (
        FP8 | {"x_scale_inv": np.ones((2, 7), np.float32)},
        "7 blocks of 32 don't make 130",
    ),
    (FP8 | {"x_scale_inv": np.ones(2, np.float32)}, r"FP8 is .*\[2\]|float32\[2\]"),
    (FP8 | {"x_scale_inv": np.ones((0, 2), np.float32)}, "FP8 is"),
    (FP8 | {"x_scale_inv": np.ones((2, 2), np.int32)}, r"int32\[2,2\]"),
    (FP8 | {"x": np.ones((130, 130), np.int8)}, r"int8\[130,130\]"),
    (MX | {"x_blocks": MX["x_blocks"][..., :15]}, r"uint8\[2,6,2,15\].*\n?.*16 bytes"),
    (MX | {"x_scales": MX["x_scales"][:, :5]}, r"uint8\[2,5,2\]"),
    (MX | {"x_scales": MX["x_scales"].astype(np.float32)}, r"float32\[2,6,2\]"),
    ({n: x[0] for n, x in MX.items()}, r"uint8\[6,2\]"),
)
def test_scales_that_do_not_fit_are_an_error(file, words):
    model = nnx.Dict(x=array(130, 130))
    with pytest.raises(nnx.errors.WeightsError, match=words):
        nnx.weights.load(file, model, {"x": "x"})
    assert not model.x[...].any()


def test_a_float8_tensor_without_scales_beside_one_that_has_some_is_an_error():
    file = FP8 | without(float8("y", 130, 130)[0], "y_scale_inv")
    model = nnx.Dict(x=array(130, 130), y=array(130, 130))
    with raises(nnx.errors.WeightsError, "'y'", "no y_scale_inv", "Get the file again"):
        nnx.weights.load(file, model, {"x": "x", "y": "y"})
    assert not model.x[...].any()
    nnx.weights.load(
        without(FP8, "x_scale_inv"), nnx.Dict(x=array(130, 130)), {"x": "x"}
    )


@pytest.mark.parametrize("part", ["x_blocks", "x_scales"])
def test_half_of_a_tensor_is_missing_and_unexpected(part):
    model = nnx.Dict(x=array(2, 64, 6))
    with raises(
        nnx.errors.StateMismatchError, "missing", "x, for x", "unexpected", part
    ):
        nnx.weights.load({part: MX[part]}, model, {"x": "x"})
