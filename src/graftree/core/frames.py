"""Room for the frames of many calls, one inside the other.

CPython keeps the frames of Python functions in chunks of 16 KiB, some 50 frames each.
It asks the system for a chunk when the last one is full, and gives it back as soon as
the frames in it have returned. Where the stack happens to be near the end of a chunk,
many small calls each ask for one and give it back. JAX traces by many small calls, 60
to 150 deep: the same model takes up to 1.4 times as long to trace, depending on how
deep the program is that calls it.

A chunk has at least the size of the frame that it is made for, rounded up to a power of
two. So one frame that claims to be a little larger than a power of two leaves nearly as
much free for the frames after it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

# In words of 8 bytes: a chunk of 512 KiB, half of it for a thousand frames to come. The
# system gives memory that is touched only.
_ROOM = 2**15 + 2**7


def _roomy(function: F) -> F:
    code = function.__code__.replace(co_stacksize=_ROOM)
    return cast("F", FunctionType(code, function.__globals__))


@_roomy
def with_room(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Calls a function where the frames after it have room; takes 4 us more."""
    return function(*args, **kwargs)
