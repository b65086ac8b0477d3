"""The source at a path: a file, a set of files, or what a folder has."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from graftree.weights import (
    archives,
    array_mappings,
    indexes,
    other_formats,
    stored_tensors,
    tensor_files,
)

INDEX = ".safetensors.index.json"
FILE = ".safetensors"


def open(source: str | os.PathLike[str] | Mapping[str, Any]) -> stored_tensors.Source:
    """Opens a source and checks what it says of its tensors; reads none.

    Args:
        source: A ``.safetensors`` file; an index of such files; an ``.npz`` file; a
            folder with one of the first two; or arrays by name, of NumPy, JAX or
            PyTorch.

    Raises:
        WeightsError: If it can't be read, is damaged, or is one of several.
        TypeError: If it is none of these, or if a value is no array.
    """
    if isinstance(source, Mapping):
        return array_mappings.ArrayMapping(source)
    if not isinstance(source, str | os.PathLike):
        raise TypeError(
            "nnx.weights reads a path, or a dict of arrays by name, not a "
            f"{type(source).__name__}."
        )
    path = os.path.expanduser(os.fspath(source))
    if os.path.isdir(path):
        path = _found_in(path)
    if path.endswith(".json"):
        return indexes.IndexedFiles(path)
    if path.endswith(".npz"):
        return archives.Archive(path)
    return tensor_files.TensorFile(path)


def _found_in(folder: str) -> str:
    """The one file to read in a folder."""
    names = sorted(os.listdir(folder))
    files = [name for name in names if name.endswith(FILE)]
    index = [name for name in names if name.endswith(INDEX)]
    for chosen in (["model" + FILE], index, files):
        if len(chosen) == 1 and chosen[0] in names:
            if chosen[0] == "model" + FILE and "model" + INDEX in names:
                break
            return os.path.join(folder, chosen[0])
    if not files + index:
        what = f"it has no {FILE} file"
        paths = [os.path.join(folder, name) for name in names]
        others = zip(paths, map(other_formats.found_in, paths), strict=True)
        path, other = next(((p, x) for p, x in others if x), (folder, None))
        if other is not None:
            what += f"; {path} is {other.what}"
        way_out = other.way_out if other else "Pass the path of a file."
    else:
        what = "it has several files, and none is said to be first: "
        what += ", ".join(index + files)
        way_out = "Pass the path of one of them, or of an index (.json) of a set."
    raise stored_tensors.refusal(folder, what, way_out=way_out)
