"""One safetensors file: its header is read and checked, then slices of its tensors."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from graftree.weights import headers, open_files, other_formats, stored_tensors


class TensorFile(stored_tensors.Source):
    """A safetensors file that is open.

    Raises:
        WeightsError: If it can't be read, or anything in its header is wrong.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = open_files.OpenFile(path)
        self.name = self._file.name
        try:
            self._data = 8 + self._header_size()
            header = headers.parse(
                self._file.read_bytes(8, self._data - 8),
                self._file.size - self._data,
                self.name,
            )
        except BaseException:
            self.close()
            raise
        self._begins = header.begins
        self.tensors = header.tensors
        self.metadata = header.metadata

    def _header_size(self) -> int:
        if self._file.size < 8:
            raise stored_tensors.refusal(
                self.name,
                f"it has {self._file.size} bytes, and a header alone has more",
            )
        size = int.from_bytes(self._file.read_bytes(0, 8), "little")
        other = other_formats.found_in(self.name)
        if other is not None and 8 + size > self._file.size:
            raise stored_tensors.refusal(
                self.name, f"it is {other.what}", way_out=other.way_out
            )
        if size > headers.MAX_SIZE:
            raise stored_tensors.refusal(
                self.name,
                f"its header would have {size} bytes, and {headers.MAX_SIZE} are "
                "the most",
                way_out="It is damaged, or no safetensors file.",
            )
        if 8 + size > self._file.size:
            raise stored_tensors.refusal(
                self.name,
                f"its header would have {size} bytes, and the file has "
                f"{self._file.size}: it is cut off",
            )
        return size

    @property
    def bytes_read(self) -> int:
        """How many bytes of data have been read."""
        return self._file.bytes_read

    def read(
        self,
        name: str,
        index: Sequence[slice],
        shape: Sequence[int] | None = None,
    ) -> np.ndarray:
        """Reads a slice of a tensor, and no bytes beside it."""
        offset = self._data + self._begins[name]
        stored = self.tensors[name].viewed(shape)
        array = self._file.read_array(stored, offset, index)
        if array.dtype == np.bool_ and (array.view(np.uint8) > 1).any():
            raise stored_tensors.refusal(
                self.name, "booleans that are neither 0 nor 1", name
            )
        return array

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
