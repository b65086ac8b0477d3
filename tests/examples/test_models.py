"""The language models of examples/models: the numbers that Hugging Face computes."""

import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from examples.models import gpt2, llama, pretrained, qwen3
from tests.weights import checkpoints_of_hf


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_logits_and_tokens(name):
    folder = checkpoints_of_hf.folder(name)
    expected = np.load(folder / "expected.npz")
    model = pretrained.load(folder)
    logits = model(jnp.asarray(expected["tokens"]))
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4)
    # Token 0 is padding where these were made: of qwen3's prompt one is left out.
    made = nnx.decoding.generate(model, expected["prompt"], max_new_tokens=16, pad=0)
    new = expected["generated"][:, expected["prompt"].shape[1] :]
    np.testing.assert_array_equal(made.tokens, new)


def test_tables_are_short():
    assert max(len(x.WEIGHTS) for x in (llama, qwen3, gpt2)) <= 20


def test_another_family_is_refused():
    with pytest.raises(ValueError, match="model_type is 'bert'"):
        pretrained.family({"model_type": "bert"})


def test_other_positions_are_refused():
    content = {"model_type": "llama", "hidden_act": "silu", "rope_scaling": {}}
    content |= {"rope_parameters": {"rope_type": "yarn"}}
    with pytest.raises(ValueError, match="yarn"):
        pretrained.family(content)
