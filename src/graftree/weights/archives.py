"""``.npz`` files of NumPy, which are zip archives of arrays.

Nothing is unpickled. Of an array that is stored as it is, which is what `numpy.savez`
does, slices are read; of a compressed one (`numpy.savez_compressed`) all.
"""

from __future__ import annotations

import dataclasses
import lzma
import os
import struct
import zipfile
import zlib
from collections.abc import Sequence

import numpy as np

from graftree import errors
from graftree.weights import (
    array_mappings,
    headers,
    open_files,
    slices,
    stored_tensors,
)
from graftree.weights.stored_tensors import Stored


@dataclasses.dataclass(frozen=True)
class _Member:
    """One array of the archive.

    Attributes:
        info: What the archive says of it.
        stored: What its own header says, and how its bytes are.
        is_fortran: Whether the first axis varies fastest.
        begin: Where its data begins in the file; None if it is compressed.
    """

    info: zipfile.ZipInfo
    stored: Stored
    is_fortran: bool
    begin: int | None


class Archive(stored_tensors.Source):
    """An ``.npz`` file that is open.

    Raises:
        WeightsError: If it can't be read, or one of its arrays is none of numbers.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = open_files.OpenFile(path)
        self.name = self._file.name
        self._whole_bytes = 0
        try:
            self._zip = self._guarded(lambda: zipfile.ZipFile(self._file.stream))
            self._members = {}
            for info in self._zip.infolist():
                name = info.filename.removesuffix(".npy")
                if name in self._members:
                    raise self._refused("is there twice", name)
                self._members[name] = self._guarded(
                    lambda name=name, info=info: self._member(name, info), name
                )
        except BaseException:
            self.close()
            raise
        self.tensors = {
            name: Stored(member.stored.dtype.newbyteorder("="), member.stored.shape)
            for name, member in self._members.items()
        }

    @property
    def bytes_read(self) -> int:
        """How many bytes of arrays have been read."""
        return self._file.bytes_read + self._whole_bytes

    def read(
        self,
        name: str,
        index: Sequence[slice],
        shape: Sequence[int] | None = None,
    ) -> np.ndarray:
        """Reads a slice of an array."""
        member = self._members[name]
        stored = member.stored.viewed(shape)
        slices.bounds_of(stored.shape, index)
        if member.begin is None or (member.is_fortran and stored != member.stored):
            whole = self._guarded(lambda: self._whole(member), name)
            self._whole_bytes += whole.nbytes
            # A copy: a view would keep all of it.
            array = np.array(whole.reshape(stored.shape)[tuple(index)])
        elif member.is_fortran:
            turned = Stored(member.stored.dtype, member.stored.shape[::-1])
            array = self._file.read_array(turned, member.begin, index[::-1]).T
        else:
            array = self._file.read_array(stored, member.begin, index)
        return array.astype(self.tensors[name].dtype, order="C", copy=False)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _whole(self, member: _Member) -> np.ndarray:
        with self._zip.open(member.info) as stream:
            return np.lib.format.read_array(stream, allow_pickle=False)

    def _member(self, name: str, info: zipfile.ZipInfo) -> _Member:
        """Reads the header of an array and checks it."""
        if not info.filename.endswith(".npy"):
            raise self._refused("is no array (.npy)", name)
        with self._zip.open(info) as stream:
            version = np.lib.format.read_magic(stream)
            if version not in _READERS:
                raise self._refused(f"the unknown version {version} of .npy", name)
            shape, is_fortran, dtype = _READERS[version](stream)
            header_size = stream.tell()
        if not array_mappings.is_numeric(dtype):
            raise self._refused(
                f"dtype {dtype}, which is no number{_lost(dtype)}", name
            )
        stored = Stored(dtype, shape)
        if len(shape) > headers.MAX_RANK or min(shape, default=0) < 0:
            raise self._refused(f"the shape {[*shape][:65]}", name)
        if header_size + stored.nbytes != info.file_size:
            raise self._refused(
                f"{dtype}{[*shape]} has {stored.nbytes} bytes, and the file has "
                f"{info.file_size - header_size} for it",
                name,
            )
        begin = None
        if info.compress_type == zipfile.ZIP_STORED:
            begin = self._begin(info) + header_size
            if begin + stored.nbytes > self._file.size:
                raise self._refused("it is cut off", name)
        return _Member(info, stored, is_fortran, begin)

    def _begin(self, info: zipfile.ZipInfo) -> int:
        """Where the data of a member begins: after a header of its own in the zip."""
        local = self._file.read_bytes(info.header_offset, 30)
        name_size, extra_size = struct.unpack("<HH", local[26:])
        return info.header_offset + 30 + name_size + extra_size

    def _refused(self, what: str, name: str | None = None) -> errors.WeightsError:
        return stored_tensors.refusal(self.name, what, name)

    def _guarded(self, function, name: str | None = None):
        """The result, with all that a damaged archive raises as one error."""
        try:
            return function()
        except errors.WeightsError:
            raise
        except _DAMAGE as error:
            raise self._refused(f"{type(error).__name__}: {error}", name) from error


# Of the three versions that NumPy writes, the last is for names that are not Latin-1,
# which only structured arrays have.
_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}

_DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error),
    *(EOFError, OSError, ValueError, NotImplementedError, RuntimeError),
    *(KeyError, IndexError, TypeError, OverflowError, SyntaxError, MemoryError),
)


def _lost(dtype: np.dtype) -> str:
    """What NumPy may have lost of it."""
    if dtype.kind == "V" and dtype.names is None:
        return ": NumPy stores bfloat16 and float8 so, and loses which it was"
    return ""
