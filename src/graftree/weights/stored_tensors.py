"""Tensors that are stored somewhere, by name: what all kinds of files have in common.

What a `Source` says of its tensors was checked when it was made. It reads on demand and
keeps nothing of what it has read.

Which bytes of a tensor belong to a slice of it say `bounds_of` and `runs`. Axes are
first merged: one that is taken whole belongs to the axis before it. So each of those
that are left, but for the first, is taken in part, and the last one is a run of bytes
without a gap:

    float32[6,4,5], [1:3, :, :]   one axis of 120, from 20 to 60   1 run of 160 bytes
    float32[6,4,5], [:, 1:2, :]   6 of 6, and 5 to 10 of 20        6 runs of 20 bytes
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from graftree import errors

# Of NumPy.
MAX_RANK = 64


@dataclasses.dataclass(frozen=True)
class Stored:
    """What is said of a tensor before it is read.

    Attributes:
        dtype: Its dtype; those that NumPy lacks, such as bfloat16, are of ml_dtypes.
        shape: Its shape.
    """

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes its elements have."""
        return self.size * self.dtype.itemsize


class Source:
    """Tensors by name; a context manager that closes the files.

    Attributes:
        name: The path, or what else it is, for messages.
        tensors: What is said of each tensor.
        metadata: The text that a safetensors file has beside them; None if it has none.
        bytes_read: How many bytes of data have been read, headers not counted.

    Args:
        read: ``(name, index, stored) -> array`` reads a slice of a tensor as a new
            array, as if the tensor were ``stored``, which has as many elements.
        files: Closes the files.
    """

    def __init__(
        self,
        name: str,
        tensors: Mapping[str, Stored],
        read: Callable[[str, tuple[slice, ...], Stored], np.ndarray],
        files: contextlib.ExitStack,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.tensors = tensors
        self.metadata = metadata
        self.bytes_read = 0
        self._read = read
        self._files = files

    def read(
        self, name: str, index: Sequence[slice], shape: Sequence[int] | None = None
    ) -> np.ndarray:
        """Reads a slice of a tensor as a new array, and no bytes beside it.

        Args:
            name: One of ``tensors``.
            index: A slice of step 1 for each axis.
            shape: Read as if the tensor had this shape, with as many elements.

        Raises:
            WeightsError: If the data can't be read, or is not what it is said to be.
        """
        stored = self.tensors[name]
        if shape is not None:
            stored = Stored(stored.dtype, tuple(shape))
        bounds_of(stored.shape, index)
        array = self._read(name, tuple(index), stored)
        self.bytes_read += array.nbytes
        return array

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._files.close()


# Of an axis: its size, and where the slice starts and stops.
Bounds = tuple[int, int, int]


def bounds_of(shape: Sequence[int], index: Sequence[slice]) -> list[Bounds]:
    """The bounds of a slice.

    Raises:
        ValueError: If it has another rank, or a step.
    """
    if len(index) != len(shape) or any(part.step not in (None, 1) for part in index):
        raise ValueError(f"{index} is no slice of step 1 of the shape {tuple(shape)}.")
    bounds = []
    for size, part in zip(shape, index, strict=True):
        start, stop, _ = part.indices(size)
        bounds.append((size, start, max(start, stop)))
    return bounds


def runs(bounds: Sequence[Bounds], itemsize: int) -> tuple[int, Iterator[int]]:
    """How long each run of bytes is, and where they start."""
    if any(start == stop for _, start, stop in bounds):
        return 0, iter(())
    *outer, (size, start, stop) = _merged(bounds)
    first = start * itemsize
    starts = (first + base for base in _starts(outer, size * itemsize))
    return (stop - start) * itemsize, starts


def _merged(bounds: Sequence[Bounds]) -> list[Bounds]:
    merged: list[Bounds] = [(1, 0, 1)]
    for size, start, stop in bounds:
        last, begin, end = merged[-1]
        if (start, stop) == (0, size):
            merged[-1] = (last * size, begin * size, end * size)
        elif (begin, end) == (0, 1) == (0, last):
            merged[-1] = (size, start, stop)
        else:
            merged.append((size, start, stop))
    return merged


def _starts(axes: Sequence[Bounds], width: int) -> Iterator[int]:
    """Where each element of the slice starts, one by one: there may be millions."""
    if not axes:
        yield 0
        return
    *outer, (size, start, stop) = axes
    for base in _starts(outer, size * width):
        yield from range(base + start * width, base + stop * width, width)


# What a file that breaks its format is good for.
SUSPECT = (
    "The file is damaged, or was made to mislead: get it again from where it is from."
)


def refusal(
    source: str,
    what: str,
    tensor: str | None = None,
    way_out: str = SUSPECT,
    verb: str = "read",
) -> errors.WeightsError:
    """The error to raise for a file that is not read, or not written.

    Args:
        source: The path of the file.
        what: What is wrong, as the end of a sentence.
        tensor: The tensor that it is about, if it is about one.
        way_out: What to do.
        verb: What can't be done with the file.
    """
    subject = "" if tensor is None else f"tensor {quoted(tensor)}: "
    text = f"nnx.weights can't {verb} {source}."
    return errors.WeightsError(
        errors.message(text, where=subject + what, way_out=way_out)
    )


def misuse(
    what: str,
    where: Iterable[str] = (),
    way_out: str = "",
    kind: type[Exception] = ValueError,
) -> Exception:
    """The error for a table, a model and a file that don't go together.

    Args:
        what: What is wrong, as a sentence.
        where: Paths, names or values; the first ones are listed.
        way_out: What to do.
        kind: Its class.
    """
    lines = "\n".join([*where][:12])
    return kind(errors.message(what, where=lines, way_out=way_out))


def quoted(text: str) -> str:
    """Text from a file as part of a message: one line, and not too long."""
    return ascii(text) if len(text) <= 200 else ascii(text[:200]) + "..."
