"""Adapters of PEFT: the logits that PEFT computes, and what does not fit."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from examples.models import llama, pretrained
from tests.weights import checkpoints_of_hf

LAYERS = ["**.attention.{query,value}", "**.mlp.down"]


@pytest.mark.parametrize("is_prepared", [False, True])
def test_the_logits_are_those_of_peft(is_prepared, tmp_path):
    folder = checkpoints_of_hf.folder("llama")
    expected = np.load(folder / "lora" / "expected.npz")
    model = pretrained.load(folder)
    if is_prepared:
        nnx.surgery.add_lora(model, LAYERS, rank=4, alpha=8, rngs=nnx.Rngs(0))
    paths = nnx.weights.load_adapter(folder / "lora", model, llama.WEIGHTS)
    assert len(paths) == 9
    logits = model(jnp.asarray(expected["tokens"]))
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4)
    nnx.weights.save_adapter(tmp_path, model, llama.WEIGHTS)
    file = "adapter_model.safetensors"
    assert (tmp_path / file).read_bytes() == (folder / "lora" / file).read_bytes()
    theirs = json.loads((folder / "lora" / "adapter_config.json").read_text())
    ours = json.loads((tmp_path / "adapter_config.json").read_text())
    for key in ("peft_type", "r", "lora_alpha", "target_modules", "bias"):
        assert ours[key] == theirs[key]


def make(stacked=False):
    def linear(rngs):
        return nnx.Linear(4, 4, use_bias=False, rngs=rngs)

    rngs = nnx.Rngs(0)
    if stacked:
        return nnx.Dict(blocks=nnx.Stack(linear, 3, rngs=rngs))
    return nnx.Dict(blocks=nnx.List([linear(rngs) for _ in range(3)]))


TABLE = {"h.{i}": "blocks[{i}]"}


def adapted(where="blocks[*]", **options):
    model = make()
    nnx.surgery.add_lora(model, where, rngs=nnx.Rngs(1), **{"rank": 2, **options})
    for layer in model.blocks:
        if hasattr(layer, "lora"):
            layer.lora.lora_b[...] = jnp.ones(layer.lora.lora_b.shape)
    return model


def test_an_adapter_of_a_list_fits_a_stack(tmp_path):
    model, stack = adapted(alpha=6), make(stacked=True)
    nnx.weights.save_adapter(tmp_path, model, TABLE)
    assert nnx.weights.load_adapter(tmp_path, stack, TABLE) == [("blocks", "layers")]
    x = y = jnp.ones((1, 4))
    for layer in model.blocks:
        x = layer(x)
    np.testing.assert_allclose(stack.blocks(y), x, rtol=1e-5)


def test_ranks_and_scales_by_layer(tmp_path):
    model = adapted("blocks[:2]", alpha=6)
    nnx.surgery.add_lora(model, "blocks[2]", rank=3, alpha=5, rngs=nnx.Rngs(2))
    nnx.weights.save_adapter(tmp_path, model, TABLE)
    plain = make()
    nnx.weights.load_adapter(tmp_path, plain, TABLE)
    scales = [layer.lora.scale for layer in plain.blocks]
    assert scales == pytest.approx([3, 3, 5 / 3])


def test_part_of_a_stack_is_refused(tmp_path):
    nnx.weights.save_adapter(tmp_path, adapted("blocks[1]"), TABLE)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == ["h.1"]
    stack = make(stacked=True)
    with pytest.raises(ValueError, match="1 of the 3 layers stacked"):
        nnx.weights.load_adapter(tmp_path, stack, TABLE)
    assert not nnx.state(stack, nnx.LoRAParam)


def test_unknown_layers_are_listed(tmp_path):
    nnx.weights.save_adapter(tmp_path, adapted(), TABLE)
    model = make()
    with pytest.raises(ValueError, match=r"h\.2\.lora_B\.weight"):
        nnx.weights.load_adapter(tmp_path, model, {"h.0": "blocks[0]"})
    assert not nnx.state(model, nnx.LoRAParam)


def test_layers_that_are_adapted_otherwise_are_listed(tmp_path):
    nnx.weights.save_adapter(tmp_path, adapted(), TABLE)
    model = adapted("blocks[:2]", rank=3)
    before = nnx.to_pure_dict(nnx.state(nnx.clone(model)))
    with pytest.raises(ValueError, match=r"blocks\[2\]: the model has none") as error:
        nnx.weights.load_adapter(tmp_path, model, TABLE)
    assert "blocks[0]: the model has rank 3" in str(error.value)
    assert str(before) == str(nnx.to_pure_dict(nnx.state(model)))


def test_other_shapes_are_refused(tmp_path):
    nnx.weights.save_adapter(tmp_path, adapted(), TABLE)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"r": 5}))
    model = make()
    with pytest.raises(ValueError, match="have other shapes"):
        nnx.weights.load_adapter(tmp_path, model, TABLE)
    assert not nnx.state(model, nnx.LoRAParam)


@pytest.mark.parametrize(
    "change",
    [{"use_dora": True}, {"bias": "all"}, {"modules_to_save": ["head"]}],
    ids=str,
)
def test_more_than_lora_is_refused(change, tmp_path):
    nnx.weights.save_adapter(tmp_path, adapted(), TABLE)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=next(iter(change))):
        nnx.weights.load_adapter(tmp_path, make(), TABLE)


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises(nnx.errors.WeightsError, match=r"adapter_config\.json"):
        nnx.weights.load_adapter(tmp_path, make(), TABLE)


def test_there_must_be_something_to_save(tmp_path):
    with pytest.raises(ValueError, match="no layer is adapted"):
        nnx.weights.save_adapter(tmp_path, make(), TABLE)
    with pytest.raises(ValueError, match=r"blocks\[1\]"):
        nnx.weights.save_adapter(tmp_path, adapted(), {"h.0": "blocks[0]"})
    assert not any(tmp_path.iterdir())
