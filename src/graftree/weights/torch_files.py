"""Converts a file of ``torch.save`` to safetensors; `__main__` runs it in a process.

Tensors that share their numbers are each written in full.
"""

from __future__ import annotations

import functools
import sys
import zipfile
from typing import Any

import numpy as np

from graftree.weights import saving, sources, stored_tensors


def convert(path: str, out: str, key: str) -> None:
    """Converts a file; an error ends the process, with its message."""
    try:
        _copy_tensors(path, out, key)
    except Exception as error:
        sys.exit(str(error))


def _copy_tensors(path: str, out: str, key: str) -> None:
    items = _items(path, key)
    tensors = {
        name: x
        for name, x in items.items()
        if isinstance(name, str) and hasattr(x, "detach")
    }
    others = [f"{n}: {_described(x)}" for n, x in items.items() if n not in tensors]
    if not tensors:
        fault = "\n".join(["it contains no tensors by name", *others[:20]])
        raise stored_tensors.file_error(
            path, fault, way_out="If one of these contains them, pass --key NAME."
        )
    with sources.open(tensors) as source:

        def read(name: str) -> np.ndarray:
            return source.read(name, [slice(None)] * len(source.tensors[name].shape))

        outs = [
            saving.NewTensor(name, stored, functools.partial(read, name))
            for name, stored in source.tensors.items()
        ]
        saving.write(out, outs, metadata={"format": "pt"})
    print(f"{out}: {len(outs)} tensors")
    for line in others[:20]:
        print(f"left out: {line}")


def _items(path: str, key: str) -> dict[Any, Any]:
    """Loads the contents of the file, or of the dict at a key of it."""
    import torch  # pyright: ignore[reportMissingImports]

    is_zip = zipfile.is_zipfile(path)  # Its tensors are read one by one.
    try:
        items = torch.load(path, map_location="cpu", mmap=is_zip, weights_only=True)
    except Exception as error:
        fault = f"{type(error).__name__}: {_reason(error)}"
        way_out = "If it contains more than tensors, save those where it was made:\n  "
        way_out += "torch.save(model.state_dict(), PATH)"
        raise stored_tensors.file_error(path, fault, way_out=way_out) from error
    for step in key.split(".") if key else []:
        items = items.get(step) if isinstance(items, dict) else None
    if not isinstance(items, dict):
        fault = (
            f"{key or 'it'} is not a dict of tensors, but of type {_described(items)}"
        )
        raise stored_tensors.file_error(path, fault, way_out="")
    return items


def _described(x: Any) -> str:
    size = f" of {len(x)}" if isinstance(x, dict | list | tuple) else ""
    return type(x).__name__ + size


def _reason(error: Exception) -> str:
    """Says the fault, without PyTorch's advice to run code that is in the file."""
    lines = str(error).strip().splitlines() or [""]
    chosen = next((line for line in lines if "WeightsUnpickler" in line), lines[0])
    return chosen.strip().partition(". ")[0]
