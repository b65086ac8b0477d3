"""PyTorch weights as safetensors: ``python -m graftree.weights convert model.pt``.

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
from graftree.weights.stored_tensors import file_error
from graftree.weights.tensor_files import SUFFIX


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m graftree.weights",
        description="Converts a file of torch.save to safetensors in another process.",
        epilog="Example: python -m graftree.weights convert model.pt "
        "writes model.safetensors, which nnx.weights.load reads.",
    )
    parser.add_argument("command", choices=["convert"], help="the only command")
    parser.add_argument("file", help="a file of torch.save, such as model.pt")
    parser.add_argument(
        "out",
        nargs="?",
        help="the new file; default: FILE with the suffix .safetensors",
    )
    parser.add_argument(
        "--key", default="", help="the entry of a dict to convert, such as state_dict"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace OUT if it exists"
    )
    options = parser.parse_args()
    out = options.out or os.path.splitext(options.file)[0] + SUFFIX
    try:
        _check(options.file, out, options.overwrite)
    except errors.WeightsError as error:
        sys.exit(str(error))
    arguments = options.file, out, options.key
    processes = multiprocessing.get_context("spawn")
    process = processes.Process(target=torch_files.convert, args=arguments)
    process.start()
    process.join()
    if process.exitcode not in (0, 1):
        saving.remove([out + saving.PARTIAL])
        fault = f"PyTorch exited with status {process.exitcode}, and nothing was "
        sys.exit(str(file_error(options.file, f"{fault}written")))
    sys.exit(process.exitcode)


def _check(path: str, out: str, overwrite: bool) -> None:
    """Raises unless it is a PyTorch file, PyTorch is installed and ``out`` is free."""
    stored_tensors.OpenFile(path).close()
    format_name, way_out = stored_tensors.recognized(path) or ("", "")
    if format_name not in stored_tensors.OF_TORCH:
        fault = f"it is {format_name}" if format_name else "torch.save did not write it"
        raise file_error(path, fault, way_out=way_out)
    if not out.endswith(SUFFIX):
        way_out = f"Choose a name that ends with {SUFFIX}."
        raise file_error(out, f"it is no {SUFFIX} file", way_out=way_out, verb="write")
    if os.path.exists(out) and not overwrite:
        way_out = "Choose another name, or pass --overwrite."
        raise file_error(out, "it exists", way_out=way_out, verb="write")
    if importlib.util.find_spec("torch") is None:
        fault = "reading it needs PyTorch, which is not installed"
        raise file_error(path, fault, way_out="pip install torch")


if __name__ == "__main__":
    main()
