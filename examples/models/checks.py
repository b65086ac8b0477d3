"""Whether a model says what Hugging Face computes: the table of ``--check``.

A folder of ``shared/hf`` has an ``expected.npz`` beside its weights: ``tokens`` with
their ``logits``, and a ``prompt`` with the ``generated`` tokens, the likeliest ones.
That of an adapter has logits alone.
"""

import pathlib
import tempfile
from typing import Any

import jax.numpy as jnp
import numpy as np

import graftree as nnx
from examples.models import pretrained

# What the prompts were padded with where these tokens were made.
PAD = 0
COLUMNS = ("folder", "largest difference of logits", "tokens", "files saved again")


def table(
    folder: pathlib.Path, content: dict[str, Any], adapter: pathlib.Path | None = None
) -> str:
    """The comparison as a table in Markdown.

    Raises:
        ValueError: If there is nothing to compare with.
    """
    model = pretrained.load(folder, content=content)
    rows = [_row(folder, model, _same_files(folder, model, content, "model*"))]
    if adapter is not None:
        _, weights = pretrained.family(content)
        nnx.weights.load_adapter(adapter, model, weights)
        with tempfile.TemporaryDirectory() as again:
            nnx.weights.save_adapter(again, model, weights)
            same = _compare(adapter, pathlib.Path(again), "*.safetensors")
        rows.append(_row(adapter, model, same))
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _row(folder: pathlib.Path, model: Any, files: str) -> tuple[str, ...]:
    path = folder / "expected.npz"
    if not path.is_file():
        raise ValueError(f"--check compares with {path}, which is missing")
    with np.load(path) as file:
        expected = {**file}
    logits = np.asarray(model(jnp.asarray(expected["tokens"])))
    largest = np.abs(logits - expected["logits"]).max()
    return (folder.name, f"{largest:.1e}", _tokens(model, expected), files)


def _tokens(model: Any, expected: Any) -> str:
    """Whether the likeliest tokens are those that were generated."""
    if "prompt" not in expected:
        return ""
    prompt = expected["prompt"]
    wanted = expected["generated"][:, prompt.shape[1] :]
    count = wanted.shape[1]
    made = nnx.decoding.generate(model, prompt, max_new_tokens=count, pad=PAD)
    same = f"{int((made.tokens == wanted).sum())} of {wanted.size} equal"
    left_out = int((prompt == PAD).sum())
    return same + (f", with pad={PAD}: {left_out} left out" if left_out else "")


def _same_files(
    folder: pathlib.Path, model: Any, content: dict[str, Any], pattern: str
) -> str:
    with tempfile.TemporaryDirectory() as again:
        pretrained.save(again, model, folder, content)
        return _compare(folder, pathlib.Path(again), pattern)


def _compare(folder: pathlib.Path, again: pathlib.Path, pattern: str) -> str:
    """Whether the files of two folders are the same, byte for byte."""
    files = {path.name: path.read_bytes() for path in folder.glob(pattern)}
    written = {path.name: path.read_bytes() for path in again.glob(pattern)}
    same = sum(written.get(name) == data for name, data in files.items())
    return f"{same} of {len({*files, *written})} equal"
