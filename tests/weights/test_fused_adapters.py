"""Adapters of PEFT for a weight that is several layers here: factor A is common.

What each layer counts as is ``w + 3 * B A``, cut as the weight itself, in NumPy.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests.comparisons import raises
from tests.weights.adapter_of_peft import check_refused, write_adapter
from tests.weights.tensors import numbers

FILE = "adapter_model.safetensors"


class Block(nnx.Module):
    """Heads of two sizes, a gated MLP and experts."""

    def __init__(self, rngs):
        def heads(count):
            return nnx.LinearGeneral(8, (count, 4), use_bias=False, rngs=rngs)

        self.query, self.key, self.value = heads(2), heads(1), heads(1)
        self.gate, self.up = (
            nnx.Linear(8, 12, use_bias=False, rngs=rngs) for _ in range(2)
        )
        self.experts = nnx.GatedExperts(3, 8, 5, rngs=rngs)


make = nnx.jit(lambda: Block(nnx.Rngs(0)))


# A weight in the file, its layers, its layout, and factors; then with how many outputs.
HEADS = ["query", "key", "value"], "+(h d) e -> e h d"
CASES = {
    "heads": ("attn.qkv.weight", *HEADS, (2, 8), (16, 2)),
    "gated": ("mlp.gate_up.weight", ["gate", "up"], "+o i -> i o", (2, 8), (24, 2)),
    "by turns": (
        *("mlp.gate_up.weight", ["gate", "up"]),
        *("(o part) i -> i o", (2, 8), (24, 2)),
    ),
    "as in GPT-2": ("attn.qkv.weight", HEADS[0], "e +(h d) -> e h d", (2, 8), (16, 2)),
    "experts": (
        *("experts.gate_up", ["experts.gate", "experts.up"]),
        *("e i (o part) -> e i o", (6, 8), (10, 6)),
    ),
}


def case(name):
    weight, layers, layout, *shapes = CASES[name]
    table = {weight: ([f"{x}.kernel" for x in layers], layout)}
    module = weight.removesuffix(".weight")
    config = {"target_modules": [module]}
    if weight == module:
        module = "experts"
        config = {"target_modules": [], "target_parameters": [weight]}
    names = [f"{module}.lora_{x}.weight" for x in "AB"]
    factors = {n: numbers(*shape) for n, shape in zip(names, shapes, strict=True)}
    return table, factors, config


def change_of(name, a, b):
    """What PEFT adds to the weight, in its axes in the file."""
    if name == "experts":
        a, b = a.reshape(3, 2, 8), b.reshape(10, 2, 3)
        return 3 * np.einsum("ore,eri->eio", b, a)
    return 3 * (b @ a).T if name == "as in GPT-2" else 3 * b @ a


def model_of(table, w):
    """A model with this weight."""
    weights = dict.fromkeys(table, w)
    return nnx.weights.load(weights, make(), table, missing=...)


@pytest.mark.parametrize("name", CASES)
def test_each_layer_gets_its_part_and_all_is_saved_as_it_was(name, tmp_path):
    table, factors, config = case(name)
    write_adapter(tmp_path, factors, **config)
    change = change_of(name, *map(np.float64, factors.values()))
    w = numbers(*change.shape)
    model, stored = model_of(table, w), (tmp_path / FILE).read_bytes()
    paths = nnx.weights.load_adapter(tmp_path, model, table)
    assert len(paths) == len(CASES[name][1])
    nnx.weights.save_adapter(tmp_path, model, table)
    assert (tmp_path / FILE).read_bytes() == stored
    nnx.surgery.merge_lora(model)
    expected = model_of(table, (w + change).astype(np.float32))
    for (path, x), y in zip(
        nnx.to_flat_state(nnx.state(model)),
        nnx.to_flat_state(nnx.state(expected)).leaves,
        strict=True,
    ):
        np.testing.assert_allclose(x[...], y[...], rtol=1e-5, atol=2e-5, err_msg=path)


def test_lengths_of_dora_are_cut_as_their_columns(tmp_path):
    table, factors, config = case("heads")
    magnitude = numbers(16)
    factors["attn.qkv.lora_magnitude_vector"] = magnitude
    write_adapter(tmp_path, factors, **config, use_dora=True)
    stored, model = (tmp_path / FILE).read_bytes(), make()
    nnx.weights.load_adapter(tmp_path, model, table)
    cut = np.split(magnitude.reshape(4, 4), [2, 3])
    for layer, expected in zip((model.query, model.key, model.value), cut, strict=True):
        np.testing.assert_array_equal(layer.lora.magnitude, expected)
    nnx.weights.save_adapter(tmp_path, model, table)
    assert (tmp_path / FILE).read_bytes() == stored


def test_what_peft_can_not_have_in_common_is_not_written(tmp_path):
    table, factors, config = case("heads")
    write_adapter(tmp_path, factors, **config)
    model = make()
    nnx.weights.load_adapter(tmp_path, model, table)
    before = (tmp_path / FILE).read_bytes()
    model.key.lora.lora_a[...] += 1.0
    told = "several layers here", "lora_a of query and key", "make them share it"
    with raises(ValueError, *told):
        nnx.weights.save_adapter(tmp_path, model, table)
    nnx.surgery.remove_lora(model, "value")
    with raises(ValueError, "lacks adapted layers", "query", "adapt all parts"):
        nnx.weights.save_adapter(tmp_path, model, table)
    nnx.surgery.add_lora(model, "value", rank=3, rngs=nnx.Rngs(0))
    with raises(ValueError, "attn.qkv: rank 2, alpha 6; rank 3, alpha 3"):
        nnx.weights.save_adapter(tmp_path, model, table)
    assert (tmp_path / FILE).read_bytes() == before


def test_factors_that_layers_share_are_trained_as_one_and_saved(tmp_path):
    table, factors, config = case("gated")
    write_adapter(tmp_path, factors, **config)
    model = make()
    nnx.weights.load_adapter(tmp_path, model, table)
    model.up.lora.lora_a = model.gate.lora.lora_a
    x = jnp.asarray(numbers(3, 8))

    def loss(model):
        return jnp.sum(jnp.sin(model.gate(x)) * model.up(x))

    wrt = nnx.DiffState(0, nnx.LoRAParam)
    gradients = nnx.jit(nnx.grad(loss, argnums=wrt))(model)
    assert len(nnx.to_flat_state(gradients).leaves) == 3
    model.gate.lora.lora_a[...] -= gradients["gate"]["lora"]["lora_a"][...]
    nnx.weights.save_adapter(tmp_path, model, table)
    again = make()
    nnx.weights.load_adapter(tmp_path, again, table)
    np.testing.assert_array_equal(again.up.lora.lora_a, model.gate.lora.lora_a)


def test_experts_with_dropout_are_not_written(tmp_path):
    table, _, _ = case("experts")
    model = make()
    rngs = nnx.Rngs(params=1, dropout=2)
    where = ["experts.gate", "experts.up"]
    nnx.surgery.add_lora(model, where, rank=2, rngs=rngs, dropout=0.5)
    model.experts.up.lora.lora_a = model.experts.gate.lora.lora_a
    with raises(ValueError, "no dropout for parameters", "experts.gate_up"):
        nnx.weights.save_adapter(tmp_path, model, table)
    assert not any(tmp_path.iterdir())


def test_experts_with_files_of_their_own_are_layers_of_peft(tmp_path):
    table = {"experts.{e}.w1.weight": ("experts.gate.kernel", "o i -> i o")}
    model = make()
    options = {"rank": 2, "use_dora": True, "rngs": nnx.Rngs(1)}
    nnx.surgery.add_lora(model, "experts.gate", **options)
    nnx.weights.save_adapter(tmp_path, model, table)
    again = make()
    assert nnx.weights.load_adapter(tmp_path, again, table) == [("experts", "gate")]
    np.testing.assert_array_equal(
        again.experts.gate.lora.magnitude, model.experts.gate.lora.magnitude
    )
    nnx.surgery.remove_lora(model)
    factors = {"experts.0.w1.lora_A.weight": numbers(2, 8)}
    factors["experts.0.w1.lora_B.weight"] = numbers(5, 2)
    write_adapter(tmp_path, factors)
    check_refused(tmp_path, model, table, "1 of the 3 layers")
