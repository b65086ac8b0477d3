"""Keeps other writers out of a folder, and lets a program save before it is stopped.

- One writer at a time in a folder: a `Lock` of the operating system, on a file there.
- Is the program about to be stopped? Answered between steps, so that it can save.
- The end of a program that did not wait for its last save: we wait for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import traceback
import weakref
from typing import Any

import jax

from graftree import _python, errors, file_locks
from graftree.checkpoints import orbax_side

# ---------------------------------------------------------------- one writer at a time
#
# The next writer takes the file that a killed one has left behind. Readers never need
# the lock.
#
# Within a process, an idle lock, such as that of a series between two saves, is handed
# to the next writer.

LOCK_ENDING = ".graftree-lock"

# The locks that this process has, by open file; changed by one thread at a time.
_locks: dict[int, weakref.ref[Lock]] = {}
_changing = threading.RLock()


class Lock:
    """Keeps other writers out, of this process and of others, until it is released.

    Collecting the object or ending the process releases it too. Of the processes of one
    program, the first takes it for all.

    Args:
        file: The file to lock, an ``epath.Path`` in a folder that is made.
        folder: The folder that is written, for messages.
    """

    def __init__(self, file: Any, folder: Any) -> None:
        self._file, self._folder = file, folder
        self._descriptor = -1
        self._free: Any = None
        self._rests = False

    def take(self) -> None:
        """Takes the lock, or checks that it still holds: the folder may be a new one.

        Raises:
            CheckpointError: If another writer has it; the message says which.
        """
        if file_locks.HAS_LOCKS and not orbax_side.is_remote(self._file):
            self._take()

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
            if self._free is not None and file_locks.is_at(self._descriptor, path):
                return
            self.release()
            with contextlib.suppress(FileExistsError):  # A file: opening says so.
                os.makedirs(os.path.dirname(path), exist_ok=True)
            self._descriptor = descriptor = self._locked(path)
            _locks[descriptor] = weakref.ref(self)
            self._free = weakref.finalize(self, _release, descriptor, path)

    def _locked(self, path: str) -> int:
        """Opens and locks the file, which must still have its name afterwards."""
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                is_free = file_locks.try_lock(descriptor)
                owner = _owner(descriptor)
                is_there = file_locks.is_at(descriptor, path)
            except BaseException:
                os.close(descriptor)
                raise
            if is_free and is_there:
                _sign(descriptor)
                return descriptor
            os.close(descriptor)
            if is_there and (handed_over := _handed_over(path)) is not None:
                return handed_over
            if is_there:
                raise errors.CheckpointError(
                    errors.message(
                        f"Saving to {self._folder} failed.",
                        where=f"It is being written by {owner}, which holds {path}.",
                        way_out="Choose another folder, or end the other writer: "
                        "wait for it, close its Checkpoints, or stop its process.",
                    )
                )


def _handed_over(path: str) -> int | None:
    """Takes the open file from an idle lock that this process has on it."""
    for descriptor, get in [*_locks.items()]:  # a lock may be collected during the loop
        lock = get()
        if lock is not None and lock._rests and file_locks.is_at(descriptor, path):
            lock._free.detach()
            lock._free = None
            return descriptor
    return None


def lock_of(folder: Any) -> Lock:
    """Makes the lock of a folder, which need not exist; the lock is beside it."""
    return Lock(folder.parent / (folder.name + LOCK_ENDING), folder)


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
    if descriptor not in _locks:  # a fork
        return
    del _locks[descriptor]
    # While the lock is held: later it might be the file of the next writer.
    with contextlib.suppress(OSError):
        if file_locks.is_at(descriptor, path):
            os.unlink(path)
    os.close(descriptor)


def _forget() -> None:
    """Closes the copies that a fork has: it could outlive the process, and block."""
    for descriptor in [*_locks]:
        os.close(descriptor)
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


# ---------------------------------------------------------------- before it is stopped
#
# Clusters send SIGTERM some time before they kill. With several processes, JAX finds a
# step at which all of them stop; with one, the signal is noted here. A program that
# never asks dies of SIGTERM as ever: the first question installs the handler. It counts
# one signal; the next one is for the handler that was there before.


class _StopSignal:
    """Handles SIGTERM, for all callers that ask."""

    def __init__(self) -> None:
        self._askers: set[int] = set()
        self._previous: Any = None
        self._was_signalled = False

    def should_stop(self, asker: object, step: int) -> bool:
        """Whether the program is to stop after this step.

        Args:
            asker: The caller, until it calls `end`; the first one installs the handler.
            step: The number of the step.
        """
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            return bool(multihost_utils.reached_preemption_sync_point(step))
        if not self._askers:
            self._install()
        self._askers.add(id(asker))
        return self._was_signalled

    def end(self, asker: object) -> None:
        """Removes an asker; the last one puts back the earlier handler."""
        self._askers.discard(id(asker))
        if not self._askers:
            self._put_back()
            self._was_signalled = False

    def _install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                errors.message(
                    "Checkpoints.should_stop must be called in the main thread "
                    "first: Python can only watch for SIGTERM there.",
                    way_out="Call it there once; then any thread may call it.",
                )
            )
        # It stays if the last asker leaves in another thread.
        if signal.getsignal(signal.SIGTERM) != self._handle:
            self._previous = signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, *_: Any) -> None:
        self._put_back()
        if self._askers:
            self._was_signalled = True
        else:
            signal.raise_signal(signal.SIGTERM)

    def _put_back(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        # Not if the program has installed another one since, or C code had one.
        if is_main and signal.getsignal(signal.SIGTERM) == self._handle:
            previous = signal.SIG_DFL if self._previous is None else self._previous
            signal.signal(signal.SIGTERM, previous)


stop_signal = _StopSignal()


# ---------------------------------------------------------------- at its end
#
# Orbax writes with threads that Python refuses to start once a program is ending, and
# the save would be lost. So this waits before that, and prints the error: no caller is
# left to raise it to.

# They are kept alive, and with them an error that was not raised yet.
_saving: set[Any] = set()
_is_registered = False


def wait_at_end(obj: Any) -> None:
    """Has ``obj.wait()`` called at the end, unless `need_not_wait` comes before."""
    global _is_registered
    _saving.add(obj)
    if not _is_registered:
        _is_registered = True
        # `atexit` comes after the threads of `concurrent.futures` have been stopped.
        # The last function on this list is called first.
        _python.register_before_threads_end(_wait_for_all)


def need_not_wait(obj: Any) -> None:
    """Undoes `wait_at_end`: nothing of ``obj`` is left to wait for."""
    _saving.discard(obj)


def _wait_for_all() -> None:
    for obj in [*_saving]:
        try:
            obj.wait()
        except Exception as error:
            traceback.print_exception(error, file=sys.stderr, chain=False)
