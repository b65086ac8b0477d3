"""Uses of CPython beyond the language: one small function each.

Each states its purpose, and the loss where a Python lacks it. None of them runs in a
warm call of a compiled function.
"""

from __future__ import annotations

import atexit
import inspect
import struct
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any, NamedTuple


def frames_above(count: int) -> Iterator[FrameType]:
    """Yields the running functions, innermost first, from ``count`` calls above on.

    To keep them, begin with 1, not with 0: kept in your own frame they are a cycle.

    It serves paths in messages, the lines of warnings, and the warning of lost updates.
    Where it gives none, these are lost.
    """
    frame = inspect.currentframe()
    for _ in range(count + 1):
        frame = frame and frame.f_back
    return _chain(frame)


def _chain(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def module_of(frame: FrameType) -> str:
    """Returns the name of the module of a running function."""
    return str(frame.f_globals.get("__name__", ""))


def is_users(frame: FrameType) -> bool:
    """Whether a running function is neither ours nor JAX's."""
    return not module_of(frame).startswith(("graftree.", "jax."))


def warn_user(text: str, category: type[Warning]) -> None:
    """Warns at the innermost line that is neither ours nor JAX's.

    It serves warnings from deep inside a layer or a transform. Without frames it is a
    line of ours.
    """
    levels = enumerate(frames_above(0), 1)
    level = next((depth for depth, frame in levels if is_users(frame)), 1)
    warnings.warn(text, category, stacklevel=level)


class ActiveCall(NamedTuple):
    """Checks whether a call of a function still runs, and keeps nothing of it alive.

    Attributes:
        address: Where the frame of the call is.
        code: The function. Other frames may be at that address later.
    """

    address: int
    code: CodeType

    @classmethod
    def of(cls, frame: FrameType) -> ActiveCall:
        """Returns the call with this frame."""
        return cls(id(frame), frame.f_code)


def locals_of(frame: FrameType) -> dict[str, Any]:
    """Returns the local names of a running function, and their values.

    It serves messages (paths, the tree that doesn't fit, the operation that a compiler
    refuses), and the warning of lost updates.
    """
    return frame.f_locals


# Counts the references to an object, to be compared with other counts.
#
# It serves `vars(obj)` whose writes give versions. Without it there are more than any
# count, no write gives a version, and such objects are compared at each call.
references: Callable[[Any], int] = getattr(sys, "getrefcount", lambda _: sys.maxsize)


def recorded(function: Callable[[], Any]) -> tuple[Any, dict[int, CodeType] | None]:
    """Calls a function; returns its output, and the code of all functions that ran.

    It serves compiled calls of layers, which must see when one of these is replaced.
    Codes are listed by their identity: their hash goes through all that is in them.
    There is no record, but ``None``, beside another profiler.
    """
    if sys.getprofile() is not None:
        return function(), None
    codes: dict[int, CodeType] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            codes[id(frame.f_code)] = frame.f_code

    sys.setprofile(note)
    try:
        return function(), codes
    finally:
        sys.setprofile(None)


def contents_of(function: FunctionType) -> list[Any]:
    """Lists what a function has captured; ``None`` for each that is not set yet.

    It serves `repr`, which shows equal layers once. Without it they are all shown.
    """
    return [_content(cell) for cell in function.__closure__ or ()]


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def evaluate(text: str) -> Any:
    """Evaluates an expression that we generated.

    It serves the flattening of objects: a third of the time of `map` and `all`.
    """
    return eval(text)


def register_before_threads_end(function: Callable[[], None]) -> None:
    """Has a function called when the program ends, while threads can still be started.

    It serves saves that no one waited for. Without it Orbax may be unable to end them.
    """
    register: Callable[..., Any] = getattr(
        threading, "_register_atexit", atexit.register
    )
    register(function)


def is_of_c(kind: type) -> bool:
    """Whether a type is defined in C, and not by a class statement.

    It serves static values, such as a date or a pattern, that have a hash: in C such
    types keep Python's promise that a hash never changes. Where it isn't known, their
    content is compared as well.
    """
    flags = kind.__flags__
    return not flags & _HEAP or bool(flags & _FIXED)


# Types that a class statement has made, or a library; those that can't be changed.
_HEAP, _FIXED = 1 << 9, 1 << 8


def hides_state(kind: type, slots: Sequence[Any]) -> bool:
    """Whether objects of a type hold more than their dict and these slots.

    It serves static values that can't be pickled. It is how `copy` itself knows that
    it can't copy an object of C.
    """
    pointers = len(slots) + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    return kind.__basicsize__ > object.__basicsize__ + pointers * _POINTER


_POINTER = struct.calcsize("P")
