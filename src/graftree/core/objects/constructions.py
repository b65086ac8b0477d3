"""Who watches objects being made.

The metaclass of Pytrees asks, for each object that it makes, whether a watcher is there
in this thread. It makes the object then, and may change it before anyone else has it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

# Called with the class, what makes the object, and the arguments that it makes it of.
Watcher = Callable[[type, Callable[[], Any], tuple[Any, ...], dict[str, Any]], Any]


class _Watch(threading.local):
    watcher: Watcher | None = None


watch = _Watch()


@contextlib.contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Has a watcher make the objects of this thread; it takes the place of another."""
    before = watch.watcher
    watch.watcher = watcher
    try:
        yield
    finally:
        watch.watcher = before
