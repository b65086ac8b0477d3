"""Who watches calls, and what JAX traces in their view.

An observer is shown the calls that `methods.Known` makes known: those of ``__call__``
and of methods that are named. If it wants all methods, attributes of Pytrees are read
through `methods.shown` while it is there; classes stay as they are.

What is traced in view of observers may hold what they gave in place of an output, so it
must not be used elsewhere; and what was traced before has not been seen. Transforms of
ours give JAX functions of the context, which go with it. All else that JAX compiles is
kept apart by a number. It serves later contexts, too, with what JAX compiled for it;
unless some of that was traced in view of observers, by ``jax.jit`` itself, for example.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from graftree import _jax
from graftree.core.objects import methods, running
from graftree.core.objects.attributes import DataObject
from graftree.core.objects.running import Arguments, Observer, Step


@contextlib.contextmanager
def observed(
    observer: Observer,
    *roots: Any,
    shows_methods: bool = False,
    shows_draws: bool = False,
) -> Iterator[None]:
    """Shows an observer the calls of methods of Pytrees in this thread.

    It is called as ``observer(frame, call)`` and returns what the method returns:
    ``call()``, or something else. The paths of what is in ``roots`` begin there: the
    key of the first step is the object itself. What `jit` has compiled is traced anew
    in the context, and what is traced there is not used outside.

    Args:
        observer: It is shown the calls of ``__call__`` and of methods that are named.
        *roots: Objects.
        shows_methods: Whether it is shown those of all public methods, too.
        shows_draws: Whether it is shown those of random streams, too.
    """
    stack = running.stack
    before = stack.top, stack.observers, stack.shows_draws, stack.apart
    named = [(Step(root, type(root).__name__), root) for root in roots]
    if named:
        stack.top = Arguments(lambda: named, before[0])
    stack.shows_draws |= shows_draws
    with contextlib.ExitStack() as ending:
        if shows_methods:
            ending.enter_context(_showing_methods)
        shown = stack.shows_methods > 0, stack.shows_draws
        stack.apart = ending.enter_context(Apart(shown))
        stack.observers = (*before[1], observer)
        try:
            yield
        finally:
            stack.top, stack.observers, stack.shows_draws, stack.apart = before


class Apart:
    """What JAX traces in view of some observers; a context.

    Args:
        shown: Whether all methods and draws are shown. A program in which nothing was
            seen may hold calls that others would see, so each kind has its numbers.
    """

    def __init__(self, shown: tuple[bool, bool]) -> None:
        self._numbers = _numbers[shown]
        self._number = self._numbers.take()
        self._programs = _jax.traced_apart(self._number)
        self._functions: dict[Any, tuple[list[Any], Callable[..., Any]]] = {}
        self._objects: list[Any] = []
        # Traces whose programs go with this context, or with what is around it.
        self._own = {_jax.recording_trace()}
        self._is_kept = False

    def __enter__(self) -> Apart:
        self._programs.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._programs.__exit__(*error)
        if not self._is_kept:
            self._numbers.give_back(self._number)

    def called(self, args: Any, kwargs: Any) -> None:
        """Takes note of a call of a transform of ours with these arguments."""
        self.heed()
        self._objects = running.objects_in(args, kwargs)

    def function(
        self, owner: Any, make: Callable[[], Callable[..., Any]]
    ) -> Callable[..., Any]:
        """What JAX is to call here in place of what it has compiled for others.

        It is for the objects of the call that was noted last: for others that are alike
        JAX would not trace it again.

        Args:
            owner: What it is a function of.
            make: Makes it.
        """
        if _jax.current_trace() is not _jax.no_trace:
            return make()  # inside a trace each call has objects of its own
        key = owner, *map(id, self._objects)
        if key not in self._functions:
            self._functions[key] = self._objects, make()
        return self._functions[key][1]

    def traced(self) -> None:
        """Takes note of a trace of ours: its program is not kept for others."""
        self._own.add(_jax.recording_trace())

    def heed(self) -> None:
        """Takes note of a call that observers may see: JAX may keep what it traces."""
        if not self._is_kept:
            self._is_kept = _jax.recording_trace() not in self._own


class _Numbers:
    """Numbers for what is traced apart; the least that is free comes first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[int] = []

    def take(self) -> int:
        with self._lock:
            return heapq.heappop(self._free) if self._free else next(_new_numbers)

    def give_back(self, number: int) -> None:
        with self._lock:
            heapq.heappush(self._free, number)


_new_numbers = itertools.count(1)
_numbers = {shown: _Numbers() for shown in itertools.product((False, True), repeat=2)}


class _ShowingMethods:
    """A context in which attributes are read through `methods.shown`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1
            running.stack.shows_methods += 1
            type.__setattr__(DataObject, "__getattribute__", _shown_attribute)

    def __exit__(self, *_: Any) -> None:
        with self._lock:
            self._count -= 1
            running.stack.shows_methods -= 1
            if self._count == 0:
                type.__delattr__(DataObject, "__getattribute__")


_showing_methods = _ShowingMethods()


def _shown_attribute(self: Any, name: str) -> Any:
    value = super(DataObject, self).__getattribute__(name)
    return methods.shown(self, name, value) if running.stack.shows_methods else value
