"""Adapters of PEFT: the logits that PEFT computes, and what does not fit."""

import json
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from examples.models import llama, pretrained
from graftree.weights import loading
from tests import tables
from tests.programs import in_one_program
from tests.weights import checkpoints_of_hf
from tests.weights.tensors import numbers

LAYERS = ["**.attention.{query,value}", "**.mlp.down"]


@pytest.mark.parametrize("is_prepared", [False, True])
def test_the_logits_are_those_of_peft(is_prepared, tmp_path):
    folder = checkpoints_of_hf.folder("llama")
    expected = np.load(folder / "lora" / "expected.npz")
    model = pretrained.load(folder)
    if is_prepared:
        nnx.surgery.add_lora(model, LAYERS, rank=4, alpha=8, rngs=nnx.Rngs(0))
    assert len(nnx.weights.load_adapter(folder / "lora", model, llama.WEIGHTS)) == 9
    logits = in_one_program(model, expected["tokens"])
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4)
    nnx.weights.save_adapter(tmp_path, model, llama.WEIGHTS)
    file = "adapter_model.safetensors"
    assert (tmp_path / file).read_bytes() == (folder / "lora" / file).read_bytes()
    theirs = json.loads((folder / "lora" / "adapter_config.json").read_text())
    ours = json.loads((tmp_path / "adapter_config.json").read_text())
    for key in ("peft_type", "r", "lora_alpha", "target_modules", "bias"):
        assert ours[key] == theirs[key]


def linear(rngs):
    return nnx.Linear(4, 4, use_bias=False, rngs=rngs)


def make():
    rngs = nnx.Rngs(0)
    return nnx.Dict(blocks=nnx.List([linear(rngs) for _ in range(3)]))


def make_stack():
    return nnx.Dict(blocks=nnx.Stack(linear, 3, rngs=nnx.Rngs(0)))


TABLE = {"h.{i}": "blocks[{i}]"}


def adapted(where="blocks[*]", **options):
    model = make()
    nnx.surgery.add_lora(model, where, rngs=nnx.Rngs(1), **{"rank": 2, **options})
    for layer in model.blocks:
        if hasattr(layer, "lora"):
            layer.lora.lora_b[...] = jnp.ones(layer.lora.lora_b.shape)
    return model


def test_an_adapter_of_a_list_fits_a_stack(tmp_path):
    model, stack = adapted(alpha=6), make_stack()
    nnx.weights.save_adapter(tmp_path, model, TABLE)
    assert nnx.weights.load_adapter(tmp_path, stack, TABLE) == [("blocks", "layers")]
    x = y = np.ones((1, 4), np.float32)
    for layer in model.blocks:
        x = in_one_program(layer, x)
    np.testing.assert_allclose(in_one_program(stack.blocks, y), x, rtol=1e-5)


def test_ranks_and_scales_by_layer(tmp_path):
    model = adapted("blocks[:2]", alpha=6)
    nnx.surgery.add_lora(model, "blocks[2]", rank=3, alpha=5, rngs=nnx.Rngs(2))
    nnx.weights.save_adapter(tmp_path, model, TABLE)
    plain = make()
    nnx.weights.load_adapter(tmp_path, plain, TABLE)
    assert [layer.lora.scale for layer in plain.blocks] == pytest.approx([3, 3, 5 / 3])


def test_layers_that_are_adapted_otherwise_are_listed(tmp_path):
    nnx.weights.save_adapter(tmp_path, adapted(), TABLE)
    model = adapted("blocks[:2]", rank=3)
    before = nnx.to_pure_dict(nnx.state(nnx.clone(model)))
    with pytest.raises(ValueError, match=r"blocks\[2\]: the model has none") as error:
        nnx.weights.load_adapter(tmp_path, model, TABLE)
    assert "blocks[0]: the model has rank 3" in str(error.value)
    assert str(before) == str(nnx.to_pure_dict(nnx.state(model)))


def check_refused(folder, model, table, said):
    with pytest.raises(ValueError, match=said):
        nnx.weights.load_adapter(folder, model, table)
    assert not nnx.state(model, nnx.LoRAParam)


def test_a_read_that_fails_leaves_the_model_as_it_was(tmp_path, monkeypatch):
    nnx.weights.save_adapter(tmp_path, adapted(), TABLE)
    model = make()
    before = nnx.graphdef(model)

    def fails(*_):
        raise OSError("the disk is gone")

    monkeypatch.setattr(loading, "arrays_from", fails)
    with pytest.raises(OSError, match="the disk is gone"):
        nnx.weights.load_adapter(tmp_path, model, TABLE)
    assert nnx.graphdef(model) == before


def test_an_adapter_of_another_model_is_refused(tmp_path):
    nnx.weights.save_adapter(tmp_path, adapted("blocks[1]"), TABLE)
    check_refused(tmp_path, make_stack(), TABLE, "1 of the 3 layers stacked")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == ["h.1"]  # those with factors
    nnx.weights.save_adapter(tmp_path, adapted(), TABLE)
    check_refused(tmp_path, make(), {"h.0": "blocks[0]"}, r"h\.2\.lora_B\.weight")


@tables.cases(
    "change, said",
    ({"r": 5}, "have other shapes"),
    ({"use_dora": True}, "use_dora"),
    ({"bias": "all"}, "bias"),
    ({"modules_to_save": ["head"]}, "modules_to_save"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights"),
    ({"an_invention_of_next_year": {"a": 1}}, "an_invention_of_next_year"),
    ids=str,
)
def test_other_shapes_and_more_than_lora_are_refused(change, said, tmp_path):
    nnx.weights.save_adapter(tmp_path, adapted(), TABLE)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    check_refused(tmp_path, make(), TABLE, said)


def test_there_must_be_something_to_load_and_to_save(tmp_path):
    with pytest.raises(nnx.errors.WeightsError, match=r"adapter_config\.json"):
        nnx.weights.load_adapter(tmp_path, make(), TABLE)
    with pytest.raises(ValueError, match="no layer is adapted"):
        nnx.weights.save_adapter(tmp_path, make(), TABLE)
    with pytest.raises(ValueError, match=r"blocks\[1\]"):
        nnx.weights.save_adapter(tmp_path, adapted(), {"h.0": "blocks[0]"})
    assert not any(tmp_path.iterdir())


def write_adapter(folder, factors, **config):
    """An adapter of rank 2 and scale 3, as PEFT writes it."""
    named = {f"base_model.model.{name}": nnx.Param(x) for name, x in factors.items()}
    nnx.weights.save(folder / "adapter_model.safetensors", nnx.Dict(named), {"": ""})
    usual = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "init_lora_weights": True}
    (folder / "adapter_config.json").write_text(json.dumps(usual | config))


A, B = "x.lora_A.weight", "x.lora_B.weight"
EMBED_A, EMBED_B = "x.lora_embedding_A", "x.lora_embedding_B"
LINEAR = partial(nnx.Linear, 5, 3, use_bias=False)
HEADS = partial(nnx.LinearGeneral, 5, (2, 3), use_bias=False)
CONV = partial(nnx.Conv, 5, 3, (3, 2), strides=2, padding="VALID", use_bias=False)


def product(a, b):
    return b @ a


# A layer, its weight in a file, its line, the factors there, and their product.
KINDS = {
    "Linear": (LINEAR, (3, 5), "layer.kernel", {A: (2, 5), B: (3, 2)}, product),
    "GPT-2's Conv1D": (
        LINEAR,
        (5, 3),
        ("layer.kernel", "i o -> i o"),
        {A: (2, 5), B: (3, 2)},
        lambda a, b: (b @ a).T,
    ),
    "heads": (HEADS, (6, 5), "layer.kernel", {A: (2, 5), B: (6, 2)}, product),
    "heads in another order": (
        HEADS,
        (6, 5),
        ("layer.kernel", "(~d h) e -> e h d"),
        {A: (2, 5), B: (6, 2)},
        product,
    ),
    "Conv": (
        CONV,
        (3, 5, 3, 2),
        "layer.kernel",
        {A: (2, 5, 3, 2), B: (3, 2, 1, 1)},
        lambda a, b: np.einsum("orxy,rihw->oihw", b, a),
    ),
    "Embed": (
        partial(nnx.Embed, 5, 3),
        (5, 3),
        "layer.embedding",
        {EMBED_A: (2, 5), EMBED_B: (3, 2)},
        lambda a, b: (b @ a).T,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapted_layer_computes_with_the_sum_of_the_weights(kind, tmp_path):
    make, shape, line, shapes, product = KINDS[kind]
    weight = numbers(*shape)
    factors = {name: numbers(*shape) for name, shape in shapes.items()}
    merged = weight + 3 * product(*factors.values())
    table = {"x.weight": line}
    abstract = nnx.eval_shape(lambda: nnx.Dict(layer=make(rngs=nnx.Rngs(0))))
    model, expected = [
        nnx.weights.load({"x.weight": x}, nnx.clone(abstract), table)
        for x in (weight, merged)
    ]
    write_adapter(tmp_path, factors)
    assert nnx.weights.load_adapter(tmp_path, model, table) == [("layer",)]
    x = np.arange(5) if kind == "Embed" else numbers(4, 7, 6, 5)
    found, expected = [in_one_program(m.layer, x) for m in (model, expected)]
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
    file = tmp_path / "adapter_model.safetensors"
    before = file.read_bytes()
    nnx.weights.save_adapter(tmp_path, model, table)
    assert file.read_bytes() == before


EMBED_TABLE = {"x": "layer"}


def adapted_embed(folder, *, base=None, held=None):
    held = numbers(5, 3) if held is None else held
    factors = {EMBED_A: numbers(2, 5), EMBED_B: numbers(3, 2)}
    if base is not None:
        factors["x.base_layer.weight"] = base
    write_adapter(folder, factors)
    model = nnx.Dict(layer=nnx.Embed(5, 3, rngs=nnx.Rngs(0)))
    nnx.weights.load({"x.weight": held}, model, EMBED_TABLE)
    nnx.weights.load_adapter(folder, model, EMBED_TABLE)
    return model, held


def test_attend_of_an_adapted_embedding_stays_as_peft_has_it(tmp_path):
    model, held = adapted_embed(tmp_path)
    query = numbers(2, 3)
    np.testing.assert_allclose(model.layer.attend(query), query @ held.T, rtol=1e-5)
    with pytest.raises(ValueError, match="adapts_attend = True"):
        nnx.surgery.merge_lora(model)


def test_an_embedding_whose_attend_is_adapted_is_not_saved(tmp_path):
    model = nnx.Dict(layer=nnx.Embed(5, 3, rngs=nnx.Rngs(0)))
    nnx.surgery.add_lora(model, "layer", rank=2, rngs=nnx.Rngs(1))
    with pytest.raises(ValueError, match="adapts_attend = False"):
        nnx.weights.save_adapter(tmp_path, model, EMBED_TABLE)
    assert not any(tmp_path.iterdir())


def test_weights_that_peft_saves_beside_factors_must_be_those_of_the_model(tmp_path):
    held = numbers(5, 3)
    adapted_embed(tmp_path, base=held, held=held)
    with pytest.raises(ValueError, match="a weight of its own for 'x'"):
        adapted_embed(tmp_path, base=held + 1, held=held)


def test_factors_of_a_fused_weight_are_refused(tmp_path):
    table = {"x.weight": (["a.kernel", "b.kernel"], "+o i -> i o")}
    rngs = nnx.Rngs(0)
    model = nnx.Dict(a=nnx.Linear(5, 3, rngs=rngs), b=nnx.Linear(5, 3, rngs=rngs))
    write_adapter(tmp_path, {A: numbers(2, 5), B: numbers(6, 2)})
    with pytest.raises(ValueError, match="several layers in the model"):
        nnx.weights.load_adapter(tmp_path, model, table)
