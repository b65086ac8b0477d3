"""The end of a program that did not wait for its last save: it is waited for here.

Orbax writes with threads that Python refuses to start once a program is ending, and the
save would be lost. So this waits before that, and prints what went wrong: nobody is
left to raise it to.
"""

from __future__ import annotations

import atexit
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

# They are kept alive, and with them an error that was not raised yet.
_saving: set[Any] = set()
_is_registered = False


def begin(obj: Any) -> None:
    """Has ``obj.wait()`` called at the end of the program, unless `end` comes first."""
    global _is_registered
    _saving.add(obj)
    if not _is_registered:
        _is_registered = True
        # `atexit` comes after the threads of `concurrent.futures` have been stopped.
        # What came last to this list is called first.
        register: Callable[..., Any] = getattr(
            threading, "_register_atexit", atexit.register
        )
        register(_wait_for_all)


def end(obj: Any) -> None:
    """Nothing of ``obj`` need be waited for any more."""
    _saving.discard(obj)


def _wait_for_all() -> None:
    for obj in [*_saving]:
        try:
            obj.wait()
        except Exception as error:
            traceback.print_exception(error, file=sys.stderr, chain=False)
