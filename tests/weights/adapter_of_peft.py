"""An adapter that PEFT 0.21.2 has written, and what its model computes with it.

DoRA with a rank-stabilized scale, dropout and a scale for one layer; the layers are a
PyTorch ``Embedding(11, 5)``, ``Conv1d(5, 7, 3, padding=1)``, ``Linear(7, 6)`` and
``Linear(6, 8, bias=False)`` in a row, each number rounded to two digits. It was made by

    config = LoraConfig(r=2, lora_alpha=6, init_lora_weights=False, use_dora=True,
        use_rslora=True, lora_dropout=0.5, alpha_pattern={"lin": 5},
        target_modules=["emb", "conv", "lin", "fc"])
    get_peft_model(model, config).save_pretrained(folder)

with torch 2.13 and a Dropout that multiplies element ``i`` of its inputs (channels
last) by 0 if ``7 * i % 3 == 0``, and else by 1.5. ``expected`` has the outputs for the
tokens without dropout and with it, and the gradients of ``sum(sin(outputs))`` then.
"""

import json
import pathlib

import numpy as np
import pytest

import graftree as nnx

TOKENS = np.array([[1, 3, 5, 0], [2, 10, 7, 7]])


def read():
    """The tensors of the model, those of the adapter, and what is expected."""
    with np.load(pathlib.Path(__file__).parent / "adapter_of_peft.npz") as file:
        groups = {"base": {}, "adapter": {}, "expected": {}}
        for name, array in file.items():
            group, _, key = name.partition(":")
            groups[group][key] = array
    return groups.values()


def kept(x):
    """What the Dropout of the recording gives."""
    i = np.arange(x.size).reshape(x.shape)
    return x * ((7 * i % 3 != 0) * 1.5).astype(x.dtype)


def write_adapter(folder, factors, **config):
    """An adapter of rank 2 and scale 3, as PEFT writes it."""
    named = {f"base_model.model.{name}": nnx.Param(x) for name, x in factors.items()}
    nnx.weights.save(folder / "adapter_model.safetensors", nnx.Dict(named), {"": ""})
    usual = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "init_lora_weights": True}
    (folder / "adapter_config.json").write_text(json.dumps(usual | config))


def check_refused(folder, model, table, said):
    with pytest.raises(ValueError, match=said):
        nnx.weights.load_adapter(folder, model, table)
    assert not nnx.state(model, nnx.LoRAParam)
