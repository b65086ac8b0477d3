"""Locks of the operating system on open files: one writer at a time.

The system frees the lock of a process that ends, however it ends. Object stores and
some network file systems have no locks, nor has Python on Windows: there, no writer is
kept out.
"""

from __future__ import annotations

import errno
import os
from typing import Any

try:
    import fcntl
except ImportError:
    fcntl: Any = None

HAS_LOCKS = fcntl is not None


def try_lock(descriptor: int) -> bool:
    """Whether the lock is ours now, or there are none on this file system."""
    try:
        if HAS_LOCKS:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        return error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
    return True


def is_at(descriptor: int, path: str) -> bool:
    """Whether an open file still has that name: another writer may have taken it."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
