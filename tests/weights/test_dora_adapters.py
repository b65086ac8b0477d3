"""DoRA and dropout in adapters of PEFT, against numbers that it has computed."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import programs, tables
from tests.comparisons import raises
from tests.weights import adapter_of_peft
from tests.weights.adapter_of_peft import check_refused, write_adapter
from tests.weights.test_adapters import (
    EMBED_TABLE,
    EXPERTS,
    TABLE,
    TARGETS,
    Experts,
    adapted,
    experts_factors,
)


class OfPeft(nnx.Module):
    """The model of the recorded adapter."""

    def __init__(self, rngs):
        self.emb = nnx.Embed(11, 5, rngs=rngs)
        self.conv = nnx.Conv(5, 7, 3, padding=1, rngs=rngs)
        self.lin = nnx.LinearGeneral(7, (2, 3), rngs=rngs)
        self.fc = nnx.Einsum("...d,df->...f", (6, 8), rngs=rngs)

    def __call__(self, tokens):
        x = self.lin(self.conv(self.emb(tokens)))
        return self.fc(x.reshape(*x.shape[:-2], 6))


OF_PEFT = {
    **{name: name for name in ("emb", "conv", "lin")},
    "fc.weight": ("fc.kernel", "f d -> d f"),
}


def test_dora_and_dropout_are_those_of_peft(tmp_path, monkeypatch):
    base, adapter, expected = adapter_of_peft.read()
    model = nnx.weights.load(base, OfPeft(nnx.Rngs(0)), OF_PEFT)
    settings = {"use_dora": True, "use_rslora": True, "lora_dropout": 0.5}
    settings |= {"r": 2, "lora_alpha": 6, "alpha_pattern": {"lin": 5}}
    prefix = "base_model.model."
    factors = {name.removeprefix(prefix): x for name, x in adapter.items()}
    write_adapter(tmp_path, factors, **settings)
    nnx.weights.load_adapter(tmp_path, model, OF_PEFT)
    file, config = tmp_path / "adapter_model.safetensors", "adapter_config.json"
    before = file.read_bytes()
    nnx.weights.save_adapter(tmp_path, model, OF_PEFT)
    assert file.read_bytes() == before
    ours = json.loads((tmp_path / config).read_text())
    assert {key: ours[key] for key in settings} == settings

    tokens = adapter_of_peft.TOKENS
    outputs = programs.in_one_program(model, tokens)  # no dropout until model.train()
    np.testing.assert_allclose(outputs, expected["eval"], rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(nnx.Dropout, "__call__", lambda _, x: adapter_of_peft.kept(x))
    model.train()

    @nnx.jit
    def step(model):
        def loss(model):
            outputs = model(tokens)
            return jnp.sum(jnp.sin(outputs)), outputs

        wrt = nnx.DiffState(0, nnx.LoRAParam)
        return nnx.grad(loss, argnums=wrt, has_aux=True)(model)

    gradients, outputs = step(model)
    np.testing.assert_allclose(outputs, expected["train"], rtol=1e-4, atol=1e-4)
    # Loaded as an adapter, their gradients are at our paths.
    of_factors = {k.removeprefix(f"grad {prefix}"): x for k, x in expected.items()}
    del of_factors["eval"], of_factors["train"]
    write_adapter(tmp_path, of_factors, **settings)
    other = nnx.weights.load(base, OfPeft(nnx.Rngs(0)), OF_PEFT)
    nnx.weights.load_adapter(tmp_path, other, OF_PEFT)
    theirs = nnx.to_flat_state(nnx.state(other, nnx.LoRAParam))
    assert len(theirs.leaves) == 12
    for (path, found), leaf in zip(
        nnx.to_flat_state(gradients), theirs.leaves, strict=True
    ):
        wanted = np.asarray(leaf[...])
        size = np.abs(wanted).max()
        np.testing.assert_allclose(found[...], wanted, atol=2e-4 * size, err_msg=path)


@tables.cases(
    "change, said",
    ({"use_dora": False}, "use_dora=False"),
    ({"ensure_weight_tying": True}, "use_dora with ensure_weight_tying"),
    ids=str,
)
def test_settings_that_do_not_fit_dora_are_refused(change, said, tmp_path):
    base, adapter, _ = adapter_of_peft.read()
    model = nnx.weights.load(base, OfPeft(nnx.Rngs(0)), OF_PEFT)
    prefix = "base_model.model."
    factors = {name.removeprefix(prefix): x for name, x in adapter.items()}
    settings = {"use_dora": True, "alpha_pattern": {"lin": 5}}
    write_adapter(tmp_path, factors, **settings | change)
    check_refused(tmp_path, model, OF_PEFT, said)


def test_peft_has_one_rate_and_one_kind_for_all(tmp_path):
    model = adapted("blocks[0]", dropout=0.5)
    nnx.surgery.add_lora(model, "blocks[1]", rank=2, rngs=nnx.Rngs(2))
    with raises(ValueError, "one dropout for all", "h.0: 0.5", "h.1: 0.0"):
        nnx.weights.save_adapter(tmp_path, model, TABLE)
    model = adapted("blocks[0]", use_dora=True)
    nnx.surgery.add_lora(model, "blocks[1]", rank=2, rngs=nnx.Rngs(2))
    with raises(ValueError, "one use_dora for all", "h.0: True", "h.1: False"):
        nnx.weights.save_adapter(tmp_path, model, TABLE)
    assert not any(tmp_path.iterdir())


def test_a_table_with_lengths_and_a_head_that_shares_it_are_refused(tmp_path):
    model = nnx.Dict(layer=nnx.Embed(5, 3, rngs=nnx.Rngs(0)))
    options = {"rank": 2, "rngs": nnx.Rngs(1), "use_dora": True}
    nnx.surgery.add_lora(model, "layer", **options)
    with raises(ValueError, "different magnitudes for a head", "adapts_attend = False"):
        nnx.weights.save_adapter(tmp_path, model, EMBED_TABLE)
    assert not any(tmp_path.iterdir())
    model.layer.lora.adapts_attend = False
    nnx.weights.save_adapter(tmp_path, model, EMBED_TABLE)


def test_a_rate_that_has_no_effect_on_params_is_told(tmp_path):
    write_adapter(tmp_path, experts_factors(), **TARGETS, lora_dropout=0.1)
    model = nnx.Dict(experts=Experts())
    with pytest.warns(UserWarning, match=r"lora_dropout=0.1 .*experts\.up"):
        nnx.weights.load_adapter(tmp_path, model, EXPERTS)
