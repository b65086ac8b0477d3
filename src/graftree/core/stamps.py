"""The structure counter: tells whether anything has changed since.

Every structural mutation of an object (an attribute set or deleted, a container
changed, metadata replaced; not the value of a Variable) takes the next number of one
global counter and writes it on the object. No number is given twice, so equal numbers
mean that nothing has changed in between.

The mutation comes first and the stamp after it: a reader of the counter before the
stamp is written sees a number that will be outdated.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Protocol

_numbers = itertools.count(1)


class _Clock:
    """Holds the number that was given out last."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0


clock = _Clock()


class Stamped(Protocol):
    """An object that carries the number of its last structural mutation."""

    stamp: int


def touch(obj: Stamped) -> None:
    """Gives ``obj`` the next number; call it after the mutation."""
    # next() is atomic, so that two threads never share a number.
    obj.stamp = number = next(_numbers)
    clock.now = number


def touch_slot(write: Callable[[Any, int], None], obj: Any) -> None:
    """`touch` for an object whose stamp is written by a function."""
    number = next(_numbers)
    write(obj, number)
    clock.now = number
