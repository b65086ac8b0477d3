"""Weights of PyTorch as safetensors: ``python -m graftree.weights convert model.pt``.

The file is whole when it is there. Of tensors that share their numbers, each gets them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np

from graftree import errors
from graftree.weights import saving, stored_tensors, tensor_files
from graftree.weights.stored_tensors import refusal
from graftree.weights.tensor_files import SUFFIX

_TORCH_SIDE = os.path.join(os.path.dirname(__file__), "torch_side.py")


# By the names that PyTorch has for them.
_DTYPES = {dtype.name: dtype for dtype in tensor_files.NAMES}


def convert(
    path: str, out: str, key: str, overwrite: bool
) -> tuple[list[saving.NewTensor], dict[str, str]]:
    """Writes the tensors of a file of ``torch.save`` to a safetensors file.

    Args:
        path: The file to read.
        out: The file to write.
        key: Of the dict in the file that has the tensors; "" for the file itself.
        overwrite: Whether ``out`` may be there.

    Returns:
        The tensors, and what else is beside them, which was left out.

    Raises:
        WeightsError: If it can't be read, has no tensors, or ``out`` can't be written.
    """
    _check(path, out, overwrite)
    with _Child(path, key) as child:
        if not child.outs:
            raise refusal(
                path,
                "\n".join(["it has no tensors by name", *_shown(child.others)]),
                way_out="If one of these has them: --key NAME",
            )
        saving.write(out, child.outs, metadata={"format": "pt"})
    return child.outs, child.others


def _check(path: str, out: str, overwrite: bool) -> None:
    stored_tensors.OpenFile(path).close()
    found, way_out = stored_tensors.found_in(path) or ("", "")
    if found not in stored_tensors.OF_TORCH:
        what = (
            f"it is {found}" if found else "it is no file that torch.save has written"
        )
        raise refusal(path, what, way_out=way_out)
    if not out.endswith(SUFFIX):
        way_out = f"Choose a name that ends with {SUFFIX}."
        raise refusal(out, f"it is no {SUFFIX} file", way_out=way_out, verb="write")
    if os.path.exists(out) and not overwrite:
        way_out = "Choose another name, or pass --overwrite."
        raise refusal(out, "it exists", way_out=way_out, verb="write")
    if importlib.util.find_spec("torch") is None:
        what = "PyTorch, which reads it, is not installed"
        raise refusal(path, what, way_out="pip install torch")


class _Child:
    """The process in which PyTorch reads a file; a context manager that ends it.

    Attributes:
        outs: The tensors, to be written. Each is asked for when its turn has come, so
            that this process has one at a time.
        others: What else is there, by name.
    """

    def __init__(self, path: str, key: str) -> None:
        self._path = path
        with contextlib.ExitStack() as stack:
            self._log = stack.enter_context(tempfile.TemporaryFile())
            # -P: the files beside the script have names of other libraries.
            command = [sys.executable, "-P", _TORCH_SIDE, path, key]
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._process = stack.enter_context(
                subprocess.Popen(command, stderr=self._log, bufsize=0, **pipes)
            )
            self._answers = io.BufferedReader(self._process.stdout)
            content = self._content()
            self.others = content["others"]
            self.outs = [self._out(*described) for described in content["tensors"]]
            self._stack = stack.pop_all()

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()

    def _content(self) -> dict[str, Any]:
        line = self._answers.readline()
        content = json.loads(line) if line else {"error": self._ending()}
        if "error" in content:
            raise refusal(
                self._path,
                content["error"].strip()[:1000],
                way_out="If it holds more than tensors, save those by themselves where "
                "it was made: torch.save(model.state_dict(), path)",
            )
        return content

    def _out(self, name: str, dtype: str, shape: list[int]) -> saving.NewTensor:
        if dtype not in _DTYPES:
            what = f"dtype or layout {dtype}, which safetensors lacks"
            raise refusal(self._path, what, name, way_out="Convert it in PyTorch.")
        stored = stored_tensors.Stored(_DTYPES[dtype], tuple(shape))

        def make() -> np.ndarray:
            with contextlib.suppress(BrokenPipeError):  # The answer will be too short.
                self._process.stdin.write(json.dumps(name).encode() + b"\n")
            data = self._answers.read(stored.nbytes)
            if len(data) < stored.nbytes:
                raise refusal(self._path, self._ending(), name, way_out="")
            return np.frombuffer(data, stored.dtype).reshape(shape)

        return saving.NewTensor(name, stored.dtype, stored.shape, make)

    def _ending(self) -> str:
        """How the process ended, which it should not have."""
        code = self._process.wait()
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip().splitlines()
        return "\n".join([f"PyTorch ended with the status {code}", *said[-3:]])


def _shown(others: dict[str, str]) -> list[str]:
    """A line for each of the first of them."""
    return [f"{name}: {what}" for name, what in others.items()][:20]


def main() -> None:
    """Does what the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m graftree.weights", description=str(__doc__).partition("\n")[0]
    )
    parser.add_argument("command", choices=["convert"])
    parser.add_argument("file", help="what torch.save has written")
    parser.add_argument("out", nargs="?", help="model.safetensors for model.pt")
    parser.add_argument("--key", default="", help="of the dict in it, as state_dict")
    parser.add_argument("--overwrite", action="store_true", help="replaces the output")
    given = parser.parse_args()
    out = given.out or os.path.splitext(given.file)[0] + SUFFIX
    try:
        outs, others = convert(given.file, out, given.key, given.overwrite)
    except errors.WeightsError as error:
        sys.exit(str(error))
    size = sum(out.stored.nbytes for out in outs)
    print(f"{out}: {len(outs)} tensors, {size:,} bytes")
    for line in _shown(others):
        print(f"left out: {line}")


if __name__ == "__main__":
    main()
