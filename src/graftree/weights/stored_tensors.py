"""Tensors that are stored somewhere, by name: what all kinds of files have in common.

A `Source` has checked what it says of its tensors when it was made. It reads on demand
and keeps nothing of what it has read.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graftree import errors


@dataclasses.dataclass(frozen=True)
class Stored:
    """What is said of a tensor before it is read.

    Attributes:
        dtype: Its dtype; those that NumPy lacks, such as bfloat16, are of ml_dtypes.
        shape: Its shape.
    """

    dtype: np.dtype
    shape: tuple[int, ...]

    def viewed(self, shape: Sequence[int] | None) -> Stored:
        """The same elements in another shape; ``None``: in its own."""
        return self if shape is None else Stored(self.dtype, tuple(shape))

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes its elements have."""
        return self.size * self.dtype.itemsize


class Source(abc.ABC):
    """Tensors by name; a context manager that closes the files.

    Attributes:
        name: The path, or what else it is, for messages.
        tensors: What is said of each tensor.
        metadata: The text that a safetensors file has beside them; None if it has none.
    """

    name: str
    tensors: Mapping[str, Stored]
    metadata: Mapping[str, str] | None = None

    @property
    @abc.abstractmethod
    def bytes_read(self) -> int:
        """How many bytes of data have been read, headers not counted."""

    @abc.abstractmethod
    def read(
        self,
        name: str,
        index: Sequence[slice],
        shape: Sequence[int] | None = None,
    ) -> np.ndarray:
        """Reads a slice of a tensor as a new array, and no bytes beside it.

        Args:
            name: One of ``tensors``.
            index: A slice of step 1 for each axis.
            shape: Read as if the tensor had this shape, with as many elements.

        Raises:
            WeightsError: If the data can't be read, or is not what it is said to be.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Closes the files; nothing can be read any more."""

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


# What a file that breaks its format is good for.
SUSPECT = (
    "The file is damaged, or was made to mislead: get it again from where it is from."
)


def refusal(
    source: str, what: str, tensor: str | None = None, way_out: str = SUSPECT
) -> errors.WeightsError:
    """The error to raise for a file that is not read.

    Args:
        source: The path of the file.
        what: What is wrong, as the end of a sentence.
        tensor: The tensor that it is about, if it is about one.
        way_out: What to do.
    """
    subject = "" if tensor is None else f"tensor {quoted(tensor)}: "
    return errors.WeightsError(
        errors.message(
            f"nnx.weights can't read {source}.", where=subject + what, way_out=way_out
        )
    )


def quoted(text: str) -> str:
    """Text from a file as part of a message: one line, and not too long."""
    return ascii(text) if len(text) <= 200 else ascii(text[:200]) + "..."
