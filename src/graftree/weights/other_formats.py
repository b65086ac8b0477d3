"""Files of weights in other formats: which one it is, and the line that reads it."""

from __future__ import annotations

import os
from typing import NamedTuple


class Format(NamedTuple):
    """A format that `nnx.weights` does not read.

    Attributes:
        magic: How its files begin.
        what: What a file is, after "it is".
        way_out: How to come by its tensors; ``PATH`` stands for the file.
    """

    magic: bytes
    what: str
    way_out: str


_LOAD = (
    "Load the tensors themselves, nnx.weights.load(tensors, ...), with\n  tensors = "
)
_TORCH = (
    f"{_LOAD}torch.load(PATH, map_location='cpu', weights_only=True)\n"
    "or the dict in it that has the tensors by name."
)
_FORMATS = (
    Format(b"PK\x03\x04", "a zip archive, as torch.save writes it", _TORCH),
    Format(b"\x80\x02", "a pickle, as older versions of torch.save write it", _TORCH),
    Format(
        b"GGUF",
        "a GGUF file, of llama.cpp",
        "Get the .safetensors files that it was made of. Or, of the package gguf: "
        f"{_LOAD}{{t.name: gguf.dequantize(t.data, t.tensor_type)\n"
        "             for t in gguf.GGUFReader(PATH).tensors}",
    ),
    Format(
        b"\x89HDF\r\n\x1a\n",
        "an HDF5 file, as Keras writes it",
        "Read its arrays with h5py into a dict by name, and load that.",
    ),
    Format(
        b"\x93NUMPY",
        "a single array of NumPy",
        f"{_LOAD}{{name: numpy.load(PATH)}}",
    ),
    Format(
        b"version https://git-lfs",
        "a pointer of Git LFS, which stands for the file",
        "Get the file itself: git lfs pull",
    ),
    Format(b"<", "a web page", "The download went to another address: get it again."),
)
_RENAMED = Format(b"PK", "an .npz archive", "Give it a name that ends with .npz.")


def found_in(path: str) -> Format | None:
    """Which format a file has by its first bytes, if it is one of these."""
    if not os.path.isfile(path):  # A pipe would block.
        return None
    try:
        with open(path, "rb") as file:
            begin = file.read(200)
    except OSError:
        return None
    for known in _FORMATS:
        if begin.startswith(known.magic):
            # The name of the first file in a zip archive is in its first bytes.
            known = _RENAMED if b".npy" in begin and known is _FORMATS[0] else known
            way_out = known.way_out.replace("PATH", repr(path))
            return known._replace(way_out=way_out)
    return None
