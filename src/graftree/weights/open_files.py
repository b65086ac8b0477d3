"""A file that is open for reading ranges of its bytes into arrays.

Nothing is mapped into memory: a file that is cut off while it is read must be an error,
not the end of the process.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Sequence

import numpy as np

from graftree import errors
from graftree.weights import slices, stored_tensors


class OpenFile:
    """A regular file.

    Attributes:
        name: Its path.
        size: How many bytes it has.
        bytes_read: How many bytes of arrays have been read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name = os.fspath(path)
        self.bytes_read = 0
        # Where there is no `preadv`, seeking and reading must not be parted.
        self._lock = threading.Lock()
        try:
            # A pipe would block, and a device never end.
            if not stat.S_ISREG(os.stat(self.name).st_mode):
                raise stored_tensors.refusal(
                    self.name, "it is not a regular file", way_out="Pass a file."
                )
            self.stream = open(self.name, "rb", buffering=0)  # noqa: SIM115
            self.size = os.fstat(self.stream.fileno()).st_size
        except OSError as error:
            raise explained(self.name, error) from error

    def close(self) -> None:
        """Closes it."""
        self.stream.close()

    def read_bytes(self, offset: int, size: int) -> bytes:
        """Reads what is no data: a header."""
        data = bytearray(size)
        self._fill(memoryview(data), offset)
        return bytes(data)

    def read_array(
        self,
        stored: stored_tensors.Stored,
        offset: int,
        index: Sequence[slice],
    ) -> np.ndarray:
        """Reads a slice of the tensor that starts at ``offset``."""
        bounds = slices.bounds_of(stored.shape, index)
        array = np.empty([stop - start for _, start, stop in bounds], stored.dtype)
        target = array.reshape(-1).view(np.uint8).data
        length, starts = slices.runs(bounds, stored.dtype.itemsize)
        for at, start in enumerate(starts):
            self._fill(target[at * length : (at + 1) * length], offset + start)
        self.bytes_read += array.nbytes
        return array

    def _fill(self, target: memoryview, offset: int) -> None:
        """Reads until ``target`` is full; the system reads 2 GB at a time at most."""
        # Of a slice there may be a million runs: each costs one call, if it can.
        while True:
            try:
                count = self._read_some(target, offset)
            except OSError as error:
                raise explained(self.name, error) from error
            if count == len(target):
                return
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


def explained(path: str, error: OSError) -> errors.WeightsError:
    """An error of the system as one of ours."""
    if isinstance(error, errors.WeightsError):
        return error
    found = stored_tensors.refusal(path, reason(error), way_out=_nearest(path))
    found.errno = error.errno
    return found


def reason(error: OSError) -> str:
    """What the system says, as a part of a message."""
    found = {
        FileNotFoundError: "nothing is there",
        IsADirectoryError: "it is a folder",
        PermissionError: "this user may not do that",
    }
    return found.get(type(error), error.strerror or type(error).__name__)


def _nearest(path: str) -> str:
    """The first part of a path that is missing."""
    parent = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(parent):
        return ""
    return f"Its parent is no folder: {parent}."
