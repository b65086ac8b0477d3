"""A file that is open for reading ranges of its bytes into arrays; what it may be.

Nothing is mapped into memory: a file that is cut off while it is read must be an error,
not the end of the process.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Iterator, Sequence

import numpy as np

from graftree import errors
from graftree.weights import stored_tensors
from graftree.weights.stored_tensors import Stored


class OpenFile:
    """A regular file.

    Attributes:
        name: Its path.
        size: How many bytes it has.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name = os.fspath(path)
        # Where there is no `preadv`, seeking and reading must not be parted.
        self._lock = threading.Lock()
        with explained(self.name):
            # A pipe would block, and a device never end.
            if not stat.S_ISREG(os.stat(self.name).st_mode):
                raise stored_tensors.refusal(
                    self.name, "it is not a regular file", way_out="Pass a file."
                )
            self.stream = open(self.name, "rb", buffering=0)  # noqa: SIM115
            self.size = os.fstat(self.stream.fileno()).st_size

    def close(self) -> None:
        """Closes it."""
        self.stream.close()

    def read_bytes(self, offset: int, size: int) -> bytes:
        """Reads what is no data: a header."""
        data = bytearray(size)
        with explained(self.name):
            self._fill(memoryview(data), offset)
        return bytes(data)

    def read_array(
        self, stored: Stored, offset: int, index: Sequence[slice]
    ) -> np.ndarray:
        """Reads a slice of the tensor that starts at ``offset``."""
        bounds = stored_tensors.bounds_of(stored.shape, index)
        array = np.empty([stop - start for _, start, stop in bounds], stored.dtype)
        target = array.reshape(-1).view(np.uint8).data
        length, starts = stored_tensors.runs(bounds, stored.dtype.itemsize)
        with explained(self.name):
            for at, start in enumerate(starts):
                self._fill(target[at * length : (at + 1) * length], offset + start)
        return array

    def _fill(self, target: memoryview, offset: int) -> None:
        """Reads until ``target`` is full; the system reads 2 GB at a time at most."""
        # Of a slice there may be a million runs: each costs one call, if it can.
        while (count := self._read_some(target, offset)) < len(target):
            if not count:
                raise stored_tensors.refusal(
                    self.name,
                    f"it ends at byte {offset}, and did not when it was opened",
                    way_out="Something writes to it: wait until that is done.",
                )
            target, offset = target[count:], offset + count

    def _read_some(self, target: memoryview, offset: int) -> int:
        if _preadv is not None:
            return _preadv(self.stream.fileno(), (target,), offset)
        with self._lock:
            self.stream.seek(offset)
            return self.stream.readinto(target) or 0


# Not on all systems.
_preadv = getattr(os, "preadv", None)


_REASONS = {
    FileNotFoundError: "nothing is there",
    IsADirectoryError: "it is a folder",
    PermissionError: "this user may not do that",
}


@contextlib.contextmanager
def explained(
    path: str, way_out: str | None = None, verb: str = "read"
) -> Iterator[None]:
    """Turns an error of the system into one of ours."""
    try:
        yield
    except errors.WeightsError:
        raise
    except OSError as error:
        what = _REASONS.get(type(error), error.strerror or type(error).__name__)
        if way_out is None:
            parent = os.path.dirname(os.path.abspath(path))
            is_there = os.path.isdir(parent)
            way_out = "" if is_there else f"Its parent is no folder: {parent}."
        found = stored_tensors.refusal(path, what, way_out=way_out, verb=verb)
        found.errno = error.errno
        raise found from error


# Files of weights in other formats: how each begins, what it is, and the way to its
# tensors, where ``PATH`` stands for the file.

_LOAD = (
    "Load the tensors themselves, nnx.weights.load(tensors, ...), with\n  tensors = "
)
_TORCH = (
    f"{_LOAD}torch.load(PATH, map_location='cpu', weights_only=True)\n"
    "or the dict in it that has the tensors by name."
)
_FORMATS = (
    (b"PK\x03\x04", "a zip archive, as torch.save writes it", _TORCH),
    (b"\x80\x02", "a pickle, as older versions of torch.save write it", _TORCH),
    (
        b"GGUF",
        "a GGUF file, of llama.cpp",
        "Get the .safetensors files that it was made of. Or, of the package gguf: "
        f"{_LOAD}{{t.name: gguf.dequantize(t.data, t.tensor_type)\n"
        "             for t in gguf.GGUFReader(PATH).tensors}",
    ),
    (
        b"\x89HDF\r\n\x1a\n",
        "an HDF5 file, as Keras writes it",
        "Read its arrays with h5py into a dict by name, and load that.",
    ),
    (
        b"\x93NUMPY",
        "a single array of NumPy",
        f"{_LOAD}{{name: numpy.load(PATH)}}",
    ),
    (
        b"version https://git-lfs",
        "a pointer of Git LFS, which stands for the file",
        "Get the file itself: git lfs pull",
    ),
    (b"<", "a web page", "The download went to another address: get it again."),
)


def found_in(path: str) -> tuple[str, str] | None:
    """What a file is by its first bytes, if it has one of these formats.

    Returns:
        What it is, and the way to its tensors.
    """
    if not os.path.isfile(path):  # A pipe would block.
        return None
    try:
        with open(path, "rb") as file:
            begin = file.read(200)
    except OSError:
        return None
    # The name of the first file in a zip archive is in its first bytes.
    if begin.startswith(b"PK") and b".npy" in begin:
        return "an .npz archive", "Give it a name that ends with .npz."
    for magic, what, way_out in _FORMATS:
        if begin.startswith(magic):
            return what, way_out.replace("PATH", repr(path))
    return None
