"""Tensors that are stored somewhere, by name: the common part of all kinds of files.

The facts of a `Source` about its tensors were checked when it was made. It reads on
demand and keeps nothing that it has read.

`bounds_of` and `runs` find the bytes of a tensor that belong to a slice of it. The last
axis that is taken in part, with the whole axes behind it, is a run of bytes without a
gap; there is one for each index along the axes before it:

    float32[6,4,5], [1:3, :, :]   2 of the first axis               1 run of 160 bytes
    float32[6,4,5], [:, 1:2, :]   1 of the second axis, 6 times     6 runs of 20 bytes
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import re
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from graftree import errors
from graftree.core.graph import differences

# Of NumPy.
MAX_RANK = 64


@dataclasses.dataclass(frozen=True)
class Stored:
    """Describes a tensor before it is read.

    Attributes:
        dtype: Its dtype; those that NumPy lacks, such as bfloat16, are of ml_dtypes.
        shape: Its shape.
    """

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes of its elements."""
        return self.size * self.dtype.itemsize


@dataclasses.dataclass(eq=False)
class Source:
    """Tensors by name; a context manager that closes the files.

    Attributes:
        name: The path, or another description, for messages.
        tensors: The facts about each tensor.
        read_slice: ``(name, index, stored) -> array`` reads a slice of a tensor as a
            new array, as if the tensor were ``stored``, with as many elements.
        files: Closes the files.
        metadata: The text that a safetensors file has beside them; None if it has none.
        bytes_read: How many bytes of data have been read, headers not counted.
    """

    name: str
    tensors: Mapping[str, Stored]
    read_slice: Callable[[str, tuple[slice, ...], Stored], np.ndarray]
    files: contextlib.ExitStack
    metadata: Mapping[str, str] | None = None
    bytes_read: int = 0

    def read(
        self, name: str, index: Sequence[slice], shape: Sequence[int] | None = None
    ) -> np.ndarray:
        """Reads a slice of a tensor as a new array, and no other bytes.

        Args:
            name: One of ``tensors``.
            index: A slice of step 1 for each axis.
            shape: Read as if the tensor had this shape, with as many elements.

        Raises:
            WeightsError: If the data can't be read, or does not match its description.
        """
        stored = self.tensors[name]
        if shape is not None:
            stored = Stored(stored.dtype, tuple(shape))
        bounds_of(stored.shape, index)
        array = self.read_slice(name, tuple(index), stored)
        self.bytes_read += array.nbytes
        return array

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.files.close()


# For an axis: its size, and the start and stop of the slice.
Bounds = tuple[int, int, int]


def bounds_of(shape: Sequence[int], index: Sequence[slice]) -> list[Bounds]:
    """Returns the bounds of a slice.

    Raises:
        ValueError: If it has another rank, or a step.
    """
    if len(index) != len(shape) or any(piece.step not in (None, 1) for piece in index):
        raise ValueError(
            f"{index} is not a slice of step 1 of the shape {tuple(shape)}."
        )
    bounds = []
    for size, piece in zip(shape, index, strict=True):
        start, stop, _ = piece.indices(size)
        bounds.append((size, start, max(start, stop)))
    return bounds


def runs(bounds: Sequence[Bounds], itemsize: int) -> tuple[int, Iterator[int]]:
    """Returns the length of each run of bytes, and their starts."""
    if any(start == stop for _, start, stop in bounds):
        return 0, iter(())
    # The bytes from an element of an axis to the next, and of a run so far.
    width = length = itemsize
    first, outer = 0, list[range]()
    for size, start, stop in reversed(bounds):
        if length == width:
            length, first = (stop - start) * width, start * width
        else:
            outer.insert(0, range(start * width, stop * width, width))
        width *= size
    # One by one: there may be millions.
    return length, map(sum, itertools.product(*outer, [first]))


# ------------------------------------------------------------------------ open files


class OpenFile:
    """A regular file.

    Attributes:
        name: Its path.
        size: How many bytes it has.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name = os.fspath(path)
        # Without `preadv`, seeking and reading must not be separated.
        self._lock = threading.Lock()
        with Explained(self.name):
            # A pipe would block, and a device never end.
            if not stat.S_ISREG(os.stat(self.name).st_mode):
                fault = "it is not a regular file"
                raise file_error(self.name, fault, way_out="Pass a file.")
            self.stream = open(self.name, "rb", buffering=0)  # noqa: SIM115
            self.size = os.fstat(self.stream.fileno()).st_size

    def close(self) -> None:
        """Closes it."""
        self.stream.close()

    def read_bytes(self, offset: int, size: int) -> bytes:
        """Reads bytes that are not data: a header."""
        data = bytearray(size)
        with Explained(self.name):
            self._fill(memoryview(data), offset)
        return bytes(data)

    def read_array(
        self, stored: Stored, offset: int, index: Sequence[slice]
    ) -> np.ndarray:
        """Reads a slice of the tensor that starts at ``offset``."""
        bounds = bounds_of(stored.shape, index)
        array = np.empty([stop - start for _, start, stop in bounds], stored.dtype)
        target = array.reshape(-1).view(np.uint8).data
        length, starts = runs(bounds, stored.dtype.itemsize)
        with Explained(self.name):
            for at, start in enumerate(starts):
                self._fill(target[at * length : (at + 1) * length], offset + start)
        return array

    def _fill(self, target: memoryview, offset: int) -> None:
        """Reads until ``target`` is full; the system reads 2 GB at a time at most."""
        # A slice may have a million runs: each costs one call, if possible.
        while (count := self._read_some(target, offset)) < len(target):
            if not count:
                fault = f"it ends at byte {offset}, unlike when it was opened"
                way_out = "Something is writing to it: wait until that is done."
                raise file_error(self.name, fault, way_out=way_out)
            target, offset = target[count:], offset + count

    def _read_some(self, target: memoryview, offset: int) -> int:
        if _preadv is not None:
            return _preadv(self.stream.fileno(), (target,), offset)
        with self._lock:
            self.stream.seek(offset)
            return self.stream.readinto(target) or 0


# Not on all systems.
_preadv = getattr(os, "preadv", None)


# ------------------------------------------------------------------------- refusals

# The advice for a file that breaks its format.
SUSPECT = (
    "The file is damaged, or made to mislead: get it again from where it came from."
)


def file_error(
    source: str,
    fault: str,
    tensor: str | None = None,
    way_out: str = SUSPECT,
    verb: str = "read",
) -> errors.WeightsError:
    """Makes the error to raise for a file that is not read, or not written.

    Args:
        source: The path of the file.
        fault: The fault, as the end of a sentence.
        tensor: The tensor that it is about, if it is about one.
        way_out: The remedy.
        verb: The action that fails on the file.
    """
    subject = "" if tensor is None else f"tensor {quoted(tensor)}: "
    text = f"nnx.weights can't {verb} {source}."
    text = errors.message(text, where=subject + fault, way_out=way_out)
    return errors.WeightsError(text)


def usage_error(
    problem: str,
    examples: Iterable[str] = (),
    way_out: str = "",
    kind: type[Exception] = ValueError,
) -> Exception:
    """Makes the error for a table, a model and a file that don't go together.

    Args:
        problem: The fault, as a sentence.
        examples: Paths, names or values; the first twelve are listed.
        way_out: The remedy.
        kind: The class of the error.
    """
    lines = "\n".join(differences.bounded([*examples], most=12))
    return kind(errors.message(problem, where=lines, way_out=way_out))


def quoted(text: str) -> str:
    """Quotes text from a file in a message: one line, and not too long."""
    return ascii(text) if len(text) <= 200 else ascii(text[:200]) + "..."


_REASONS = {
    FileNotFoundError: "it does not exist",
    IsADirectoryError: "it is a folder",
    PermissionError: "you don't have permission",
}


class Explained(NamedTuple):
    """Turns an error of the system into one of ours; a context manager.

    It is not a generator, since `contextlib` would leave a cycle of frames behind.
    """

    path: str
    way_out: str = ""
    verb: str = "read"

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if not isinstance(error, OSError) or isinstance(error, errors.WeightsError):
            return
        fault = _REASONS.get(type(error), error.strerror or type(error).__name__)
        parent, way_out = os.path.dirname(os.path.abspath(self.path)), self.way_out
        if not way_out and not os.path.isdir(parent):
            way_out = f"Its parent is not a folder: {parent}."
        explained = file_error(self.path, fault, way_out=way_out, verb=self.verb)
        explained.errno = error.errno
        raise explained from error


# Files of weights in other formats: the beginning of each, its name, and the way to its
# tensors, where ``PATH`` stands for the file. In a zip archive, the name of the first
# file comes after 30 bytes.

_LOAD = (
    "Load the tensors themselves, nnx.weights.load(tensors, ...), with\n  tensors = "
)
_TORCH = (
    "If PyTorch is installed, this writes a .safetensors file next to it:\n"
    f"  python -m graftree.weights convert PATH\nOr load{_LOAD.removeprefix('Load')}"
    "torch.load(PATH, map_location='cpu', weights_only=True)\n"
    "or the dict in it that has the tensors by name."
)
_HDF5 = (
    f"{_LOAD}{{}}\n  h5py.File(PATH).visititems(lambda name, x: tensors.update(\n"
    "      {name: x[()]} if isinstance(x, h5py.Dataset) else {}))"
)
OF_TORCH = (
    "a zip archive, as torch.save writes it",
    "a pickle, as older versions of torch.save write it",
)
_FORMATS: list[tuple[bytes, str, str]] = [
    (
        rb"PK\x03\x04.{26}[^/]*\.npy",
        "an .npz archive",
        "Give it a name that ends with .npz.",
    ),
    (
        rb"PK\x03\x04.{26}metadata\.json",
        "a .keras archive",
        "Unzip it: model.weights.h5 in it has the arrays.",
    ),
    (rb"PK\x03\x04", OF_TORCH[0], _TORCH),
    (rb"\x80[\x02-\x05]", OF_TORCH[1], _TORCH),
    (
        rb"GGUF",
        "a GGUF file, of llama.cpp",
        "Get the .safetensors files that it was made from. Or, with the package gguf: "
        f"{_LOAD}{{t.name: gguf.dequantize(t.data, t.tensor_type)\n"
        "             for t in gguf.GGUFReader(PATH).tensors}",
    ),
    (rb"\x89HDF\r\n\x1a\n", "an HDF5 file, as Keras writes it", _HDF5),
    (
        rb"([\x81-\x8f]|\xde..|\xdf....)([\xa1-\xbf]|\xd9.)[ -~]",
        "a MessagePack file, as Flax writes it",
        f"{_LOAD}flax.traverse_util.flatten_dict(\n      flax.serialization."
        "msgpack_restore(open(PATH, 'rb').read()), sep='.')",
    ),
    (rb"\x93NUMPY", "a single NumPy array", f"{_LOAD}{{name: numpy.load(PATH)}}"),
    (
        rb"version https://git-lfs",
        "a Git LFS pointer, which stands for the file",
        "Get the file itself: git lfs pull",
    ),
    (
        rb"\s*(?i:<!doctype html|<html)",
        "a web page",
        "The download led to another page: get the file again.",
    ),
]


def recognized(path: str) -> tuple[str, str] | None:
    """Recognizes a file by its first bytes, if it has one of these formats.

    Returns:
        The name of its format, and the way to its tensors.
    """
    if not os.path.isfile(path):  # A pipe would block.
        return None
    try:
        with open(path, "rb") as file:
            begin = file.read(200)
    except OSError:
        return None
    for pattern, format_name, way_out in _FORMATS:
        if re.match(pattern, begin, re.DOTALL):
            return format_name, way_out.replace("PATH", repr(path))
    return None
