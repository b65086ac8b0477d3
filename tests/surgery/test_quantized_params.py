"""Kernels in 8 and 4 bits, with LoRA on top, against qwix' numbers in float64."""

import builtins
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import graftree as nnx
from tests import meshes
from tests.comparisons import raises
from tests.surgery.adapted_kinds import CALL, KINDS, check, numbers

qwix = pytest.importorskip("qwix")
surgery = nnx.surgery
pytestmark = pytest.mark.peers
QTYPES = ["int8", "int4", "nf4"]


def quantized(name, qtype="int8", **options):
    """A model of one layer, its weight in float64, and what it counts as."""
    kind = KINDS[name]
    model = nnx.Dict(layer=kind.make(nnx.Rngs(0)))
    weights = nnx.All(nnx.Param, nnx.Not(nnx.PathContains("bias")))
    (before,) = nnx.to_flat_state(nnx.state(model, weights)).leaves
    w = np.float64(before[...])
    surgery.quantize(model, surgery.at(kind.where), qtype, **options)
    (after,) = nnx.to_flat_state(nnx.state(model, surgery.Frozen)).leaves
    assert after is before
    return kind, model, w, np.float64(after[...])


def axes_of(kind):
    """Those of inputs, by the letters of the factors."""
    factors, kernel = kind.product.split("->")
    a, b = factors.split(",")
    return tuple(i for i, x in enumerate(kernel) if x in a and x not in b)


@pytest.mark.parametrize("name", KINDS)
def test_each_output_has_a_scale_and_numbers_are_multiples_of_it(name):
    kind, model, w, rounded = quantized(name)
    # absmax: 127 steps from zero to the largest number of a column.
    steps = np.abs(w).max(axes_of(kind), keepdims=True) / 127.5
    assert np.all(np.abs(w - rounded) <= steps * 0.51)
    assert np.abs(w - rounded).max() > 0
    check(CALL(model.layer, kind.x), kind.expected(kind.x, rounded), 2e-6)
    for other in (nnx.clone(model), pickle.loads(pickle.dumps(model))):
        assert nnx.graphdef(other) == nnx.graphdef(model)
        check(CALL(other.layer, kind.x), kind.expected(kind.x, rounded), 2e-6)


@pytest.mark.parametrize(
    ("name", "options"),
    [("Linear", {}), *((name, {"use_dora": True}) for name in KINDS)],
)
def test_lora_is_trained_on_top_and_merged_into_the_rounded(name, options):
    kind, model, _, rounded = quantized(name, "int4")
    where = surgery.at(kind.where)
    surgery.add_lora(model, where, rank=2, rngs=nnx.Rngs(1), **options)
    factors = nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)).leaves
    factors[1][...] = numbers(*factors[1].shape)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)
    target = numbers(*CALL(model.layer, kind.x).shape)
    raw = [leaf.get_raw_value() for leaf in variables_of(model, surgery.Frozen)]

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            return jnp.mean((model.layer(kind.x) - target) ** 2)

        wrt = nnx.DiffState(0, nnx.LoRAParam)
        loss, grads = nnx.value_and_grad(loss, argnums=wrt)(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(10)]
    assert losses[-1] < losses[0]
    now = [leaf.get_raw_value() for leaf in variables_of(model, surgery.Frozen)]
    assert now == raw or all(map(is_equal, now, raw))
    with raises(ValueError, "quantized; nnx.surgery.dequantize"):
        surgery.merge_lora(model)
    outputs = np.float64(CALL(model.layer, kind.x))
    surgery.dequantize(model)
    check(CALL(model.layer, kind.x), outputs, 1e-6)
    (w,) = variables_of(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)))
    np.testing.assert_allclose(w[...], rounded, rtol=1e-6)
    surgery.merge_lora(model)
    check(CALL(model.layer, kind.x), outputs, 3e-6)
    assert type(w) is nnx.Param


def variables_of(model, filter):
    return nnx.to_flat_state(nnx.state(model, filter)).leaves


def is_equal(x, y):
    return all(map(np.array_equal, jax.tree.leaves(x), jax.tree.leaves(y)))


def make():
    return nnx.Dict(blocks=nnx.Stack(block, 4, rngs=nnx.Rngs(0), remat=True))


def block(rngs):
    return nnx.Linear(64, 64, use_bias=False, rngs=rngs)


@pytest.mark.parametrize("qtype", QTYPES)
def test_a_stack_takes_the_memory_of_the_bits(qtype):
    def bytes_of(model):
        run = nnx.jit(lambda model, x: model.blocks(x))
        compiled = run.lower(model, numbers(2, 64)).compile()
        return compiled.memory_analysis().argument_size_in_bytes

    model = make()
    whole = bytes_of(model)
    surgery.quantize(model, "blocks.layers", qtype, tile_size=32)
    kernel = model.blocks.layers.kernel
    assert kernel.get_raw_value().scale.shape == (4, 2, 64)
    bits = 8 if qtype == "int8" else 4
    numbers_of, scales = 4 * 64 * 64, 4 * 4 * 2 * 64
    saved = whole - bytes_of(model)
    assert saved == numbers_of * 4 - numbers_of * bits // 8 - scales
    x, rounded = numbers(2, 64), np.float64(kernel[...])
    expected = np.float64(x)
    for w in rounded:
        expected = expected @ w
    check(CALL(model.blocks, x), expected, 2e-5)


def test_a_policy_sets_the_dtype_in_which_it_is_read():
    model = make()
    surgery.quantize(model, "blocks.layers", "int4")
    nnx.precision.set_policy(model, "params=bf16, compute=bf16", strict=True)
    raw = model.blocks.layers.kernel.get_raw_value()
    assert raw.qvalue.dtype == jnp.int4 and raw.scale.dtype == jnp.bfloat16
    x = numbers(2, 64).astype(jnp.bfloat16)
    assert CALL(model.blocks, x).dtype == jnp.bfloat16


def test_an_ema_keeps_the_bits_and_averages_the_biases():
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    surgery.quantize(model, ...)
    ema = nnx.EMA(model, 0.75)
    model.bias[...] += 4.0
    ema.update(model)
    averaged = ema.apply_to(model)
    assert isinstance(averaged.kernel.get_raw_value(), qwix.QArray)
    assert np.array_equal(averaged.kernel[...], model.kernel[...])
    assert np.array_equal(averaged.bias[...], [1.0, 1.0, 1.0])


def test_layers_of_divided_bits_can_be_stacked():
    mesh = meshes.mesh_of(layers=2, rows=4)
    metadata = {"kernel_metadata": {"out_sharding": ("rows", None)}}
    with jax.set_mesh(mesh):
        layers = [nnx.Linear(8, 8, **metadata, rngs=nnx.Rngs(i)) for i in range(4)]
        model = nnx.Dict(blocks=nnx.List(layers))
        surgery.quantize(model, nnx.Linear)
        x = expected = jnp.ones((2, 8))
        for layer in layers:
            expected = layer(expected)
        surgery.stack(model, "blocks", axis_name="layers")
        np.testing.assert_allclose(model.blocks(x), expected, rtol=1e-5)
        model.blocks.each(lambda layer: None)
        kernel = model.blocks.layers.kernel.get_raw_value()
    assert kernel.qvalue.sharding.spec == P("layers", "rows", None)
    assert kernel.scale.shape == (4, 1, 8)
    assert kernel.scale.sharding.spec[0] == "layers"


def test_a_dynamic_scale_keeps_the_bits():
    model, x = nnx.Linear(4, 3, rngs=nnx.Rngs(0)), jnp.ones((2, 4))
    surgery.quantize(model, ...)
    surgery.add_lora(model, ..., rank=2, rngs=nnx.Rngs(1))
    bits = model.kernel.get_raw_value()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.LoRAParam)
    scaler = nnx.precision.DynamicScale()
    loss_fn = scaler.value_and_grad(
        lambda model: jnp.mean(model(x) ** 2), argnums=nnx.DiffState(0, nnx.LoRAParam)
    )
    scaler.update(optimizer, model, loss_fn(model)[1])
    assert model.kernel.get_raw_value() is bits
    assert model.lora.lora_b[...].any()


@pytest.mark.parametrize("qtype", ["int8", "int4"])
def test_checkpoints_and_adapters(qtype, tmp_path):
    def build():
        model = make()
        surgery.quantize(model, "blocks.layers", qtype)
        options = {"rank": 2, "rngs": nnx.Rngs(1), "use_dora": True}
        surgery.add_lora(model, "blocks.layers", **options)
        return model

    model, x = build(), numbers(2, 64)
    model.blocks.layers.lora.lora_b[...] += 0.1
    expected = CALL(model.blocks, x)
    nnx.checkpoints.save(tmp_path / "checkpoint", model)
    restored = nnx.checkpoints.restore(tmp_path / "checkpoint", nnx.eval_shape(build))
    np.testing.assert_array_equal(CALL(restored.blocks, x), expected)
    table = {"h.{i}": "blocks[{i}]"}
    nnx.weights.save_adapter(tmp_path / "adapter", model, table)
    other = make()
    surgery.quantize(other, "blocks.layers", qtype)
    nnx.weights.load_adapter(tmp_path / "adapter", other, table)
    np.testing.assert_array_equal(CALL(other.blocks, x), expected)


def test_files_of_weights_have_no_quantized_kernels(tmp_path):
    model, table = nnx.Dict(fc=nnx.Linear(4, 4, rngs=nnx.Rngs(0))), {"fc": "fc"}
    file, kernel = tmp_path / "model.safetensors", model.fc.kernel
    nnx.weights.save(file, model, table)
    before = file.read_bytes()
    surgery.quantize(model, "fc")
    raw = kernel.get_raw_value()
    abstract = nnx.eval_shape(lambda: nnx.clone(model))
    where = "  fc.kernel: float32[4,4]"
    for other in (model, abstract):
        with raises(ValueError, "nnx.weights.load: kernels", where, "then quantize it"):
            nnx.weights.load(file, other, table)
    with raises(ValueError, "nnx.weights.save: kernels", where, "dequantize(model)"):
        nnx.weights.save(file, model, table)
    assert kernel.get_raw_value() is raw and file.read_bytes() == before
    surgery.dequantize(model)
    nnx.weights.save(file, model, table)
    loaded = nnx.weights.load(file, nnx.eval_shape(lambda: nnx.clone(model)), table)
    np.testing.assert_array_equal(loaded.fc.kernel, kernel)


def test_what_cannot_be_quantized_is_listed_and_nothing_changes():
    model = nnx.Dict(
        a=nnx.Linear(6, 2, rngs=nnx.Rngs(0)), b=nnx.LayerNorm(3, rngs=nnx.Rngs(0))
    )
    before = nnx.graphdef(model)
    with raises(ValueError, "a: tile_size=4 does not divide 6 inputs"):
        surgery.quantize(model, "a", tile_size=4)
    with raises(ValueError, "b: LayerNorm has no kernel"):
        surgery.quantize(model, ["a", "b"])
    with pytest.raises(TypeError):
        surgery.quantize(model, "a", "int99")
    with pytest.raises(ValueError, match="nothing that is selected is quantized"):
        surgery.dequantize(model)
    with raises(ValueError, "abstract"):
        surgery.quantize(nnx.eval_shape(lambda: model), "a")
    assert nnx.graphdef(model) == before
    surgery.quantize(model, "a")
    with raises(ValueError, "a: it is already quantized"):
        surgery.quantize(model, "a")


def test_without_qwix_the_package_is_named(monkeypatch):
    load = builtins.__import__

    def fails(name, *args, **options):
        if name == "qwix":
            raise ImportError(name)
        return load(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", fails)
    with pytest.raises(ImportError, match="pip install qwix"):
        surgery.quantize(make(), "blocks.layers")
