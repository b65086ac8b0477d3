"""A model from a folder of Hugging Face: its config.json and its weights."""

import json
import pathlib
from typing import Any

import graftree as nnx
from examples.models import gpt2, llama, qwen3


def load(
    folder: str | pathlib.Path, *, dtype: Any = None, shardings: Any = None
) -> Any:
    """Makes the model that a folder has.

    Args:
        folder: Has a ``config.json``, and safetensors files.
        dtype: As for `nnx.weights.load`.
        shardings: As for `nnx.weights.load`.

    Raises:
        ValueError: If it is of another family.
    """
    content = json.loads((pathlib.Path(folder) / "config.json").read_text())
    make, weights = family(content)
    model = nnx.eval_shape(make)
    return nnx.weights.load(folder, model, weights, dtype=dtype, shardings=shardings)


def family(content: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The constructor of a model, and its table of weights."""
    kind = content.get("model_type")
    if kind == "gpt2":
        config = gpt2.Config.from_json(content)
        return lambda: gpt2.GPT2(config, rngs=nnx.Rngs(0)), gpt2.WEIGHTS
    if kind == "llama":
        config = llama.Config.from_json(content)
        return lambda: llama.Llama(config, rngs=nnx.Rngs(0)), llama.WEIGHTS
    if kind == "qwen3":
        config = llama.Config.from_json(content, normalizes_heads=True)
        return lambda: llama.Llama(config, rngs=nnx.Rngs(0)), qwen3.WEIGHTS
    raise ValueError(f"model_type is {kind!r}; known are gpt2, llama and qwen3")
