"""One writer at a time in a folder: a lock of the operating system, on a file there.

The system frees the lock of a process that ends, however it ends; the file that is left
behind then is taken by the next writer. Readers never need it. Object stores have no
locks, nor have some network file systems: there nobody is kept out.

Within a process a lock that rests, as that of a series between two saves, is handed to
the next writer.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from graftree import errors
from graftree.checkpoints import orbax_side, processes

try:
    import fcntl
except ImportError:  # Windows, where nobody is kept out
    fcntl: Any = None

ENDING = ".graftree-lock"

# By the open file, the locks that this process has; changed by one thread at a time.
_held: dict[int, weakref.ref[Lock]] = {}
_changing = threading.RLock()


class Lock:
    """Keeps other writers out, of this process and of others, until it is released.

    That is also when the object is collected, or the process ends. The processes of one
    program share the lock, which the first of them holds.

    Args:
        file: The file to lock, an ``epath.Path`` in a folder that is made.
        folder: What is written, for messages.
    """

    def __init__(self, file: Any, folder: Any) -> None:
        self._file, self._folder = file, folder
        self._descriptor = -1
        self._free: Any = None
        self._rests = False

    def take(self) -> None:
        """Takes the lock, or sees that it is still there: the folder may be a new one.

        Raises:
            CheckpointError: If somebody else has it; it says who.
        """
        if fcntl is not None and not orbax_side.is_remote(self._file):
            processes.by_first(self._take)

    def rest(self) -> None:
        """Lets others of this process write, until it is taken again."""
        with _changing:
            self._rests = True

    def release(self) -> None:
        """Lets others write."""
        with _changing:
            if self._free is not None:
                self._free()
                self._free = None

    def _take(self) -> None:
        path = os.fspath(self._file)
        with _changing, orbax_side.explained("Saving to", self._folder):
            self._rests = False
            if self._free is not None and _is_at(self._descriptor, path):
                return
            self.release()
            with contextlib.suppress(FileExistsError):  # A file: opening says so.
                os.makedirs(os.path.dirname(path), exist_ok=True)
            self._descriptor = descriptor = self._locked(path)
            _held[descriptor] = weakref.ref(self)
            self._free = weakref.finalize(self, _release, descriptor, path)

    def _locked(self, path: str) -> int:
        """Opens and locks the file; the one that has the name then is the one."""
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                is_free = _try_lock(descriptor)
                owner = _owner(descriptor)
                is_there = _is_at(descriptor, path)
            except BaseException:
                os.close(descriptor)
                raise
            if is_free and is_there:
                _sign(descriptor)
                return descriptor
            os.close(descriptor)
            if is_there and (known := _handed_over(path)) is not None:
                return known
            if is_there:
                raise errors.CheckpointError(
                    errors.message(
                        f"Saving to {self._folder} failed.",
                        where=f"It is written by {owner}, which holds {path}.",
                        way_out="Choose another folder, or end the other writer: "
                        "wait, close its Checkpoints, or stop its process.",
                    )
                )


def _handed_over(path: str) -> int | None:
    """The open file of a lock on it that rests in this process, which loses it."""
    for descriptor, get in _held.items():
        lock = get()
        if lock is not None and lock._rests and _is_at(descriptor, path):
            lock._free.detach()
            lock._free = None
            return descriptor
    return None


@contextlib.contextmanager
def held(folder: Any) -> Iterator[None]:
    """Keeps others from writing a folder, which need not be there, for a while."""
    lock = Lock(folder.parent / (folder.name + ENDING), folder)
    lock.take()
    try:
        yield
    finally:
        lock.release()


def _is_at(descriptor: int, path: str) -> bool:
    """Whether an open file still is the one of that name: who releases deletes it."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _try_lock(descriptor: int) -> bool:
    """Whether the lock is ours now, or there are none on this file system."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        return error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
    return True


def _sign(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # The disk may be full; the lock holds.
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, _signature().encode(), 0)


def _signature() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _owner(descriptor: int) -> str:
    text = os.pread(descriptor, 200, 0).decode(errors="replace")
    is_here = text == _signature()
    return "another writer in this process" if is_here else text or "another writer"


def _release(descriptor: int, path: str) -> None:
    if descriptor not in _held:  # a fork
        return
    del _held[descriptor]
    # Before the lock is free, for it might be the file of the next writer.
    with contextlib.suppress(OSError):
        if _is_at(descriptor, path):
            os.unlink(path)
    os.close(descriptor)


def _forget() -> None:
    """Closes the copies that a fork has: it could outlive the process, and block."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
