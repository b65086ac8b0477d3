"""The end of a program that did not wait for its last save: it is waited for here.

Orbax writes with threads that Python refuses to start once a program is ending, and the
save would be lost. So this waits before that, and prints what went wrong: nobody is
left to raise it to.
"""

from __future__ import annotations

import sys
import traceback
from typing import Any

from graftree import _python

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
        _python.register_before_threads_end(_wait_for_all)


def end(obj: Any) -> None:
    """Nothing of ``obj`` need be waited for any more."""
    _saving.discard(obj)


def _wait_for_all() -> None:
    for obj in [*_saving]:
        try:
            obj.wait()
        except Exception as error:
            traceback.print_exception(error, file=sys.stderr, chain=False)
