"""Weights of PyTorch as safetensors: ``python -m graftree.weights convert model.pt``.

PyTorch reads in a separate process, where a bad file does no harm. A file that
exists is whole.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import sys

from graftree import errors
from graftree.weights import saving, stored_tensors, torch_files
from graftree.weights.stored_tensors import refusal
from graftree.weights.tensor_files import SUFFIX


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m graftree.weights",
        description="Writes what torch.save has written as a safetensors file.",
    )
    parser.add_argument("command", choices=["convert"], help="what to do")
    parser.add_argument("file", help="what torch.save has written")
    parser.add_argument("out", nargs="?", help="model.safetensors for model.pt")
    parser.add_argument("--key", default="", help="of the dict in it, as state_dict")
    parser.add_argument("--overwrite", action="store_true", help="replaces the output")
    given = parser.parse_args()
    out = given.out or os.path.splitext(given.file)[0] + SUFFIX
    try:
        _check(given.file, out, given.overwrite)
    except errors.WeightsError as error:
        sys.exit(str(error))
    arguments = given.file, out, given.key
    processes = multiprocessing.get_context("spawn")
    process = processes.Process(target=torch_files.convert, args=arguments)
    process.start()
    process.join()
    if process.exitcode not in (0, 1):
        saving.remove([out + saving.PARTIAL])
        what = f"PyTorch ended with the status {process.exitcode}"
        sys.exit(str(refusal(given.file, f"{what}, and nothing was written")))
    sys.exit(process.exitcode)


def _check(path: str, out: str, overwrite: bool) -> None:
    """Raises unless it is a PyTorch file, PyTorch is installed and ``out`` is free."""
    stored_tensors.OpenFile(path).close()
    found, way_out = stored_tensors.found_in(path) or ("", "")
    if found not in stored_tensors.OF_TORCH:
        what = f"it is {found}" if found else "it is not a file of torch.save"
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


if __name__ == "__main__":
    main()
