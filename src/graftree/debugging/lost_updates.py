"""Warns of lost updates, when a transform of JAX got objects as arguments.

JAX gives a function that it traces copies of its arguments, and takes back only its
results. `core.ownership.RebuiltArguments` knows which values were written into such
copies and not read since. This file decides which writes count, and reports them once
the arguments are gone. All of this happens while JAX traces.

Not counted are values that `sow` and `perturb` record, writes while a program is only
inspected (`jax.eval_shape`, `jax.make_jaxpr`), the counts of a bare `Rngs`, and those
of a Module in evaluation mode.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Container, Sequence
from types import FrameType
from typing import Any, NamedTuple

from graftree import _jax, _python, errors
from graftree.core import hooks, ownership, walks
from graftree.core.modules.modules import Module
from graftree.core.objects import running
from graftree.core.objects.running import ModuleStep
from graftree.core.rng.streams import RngState

_MOST = 3  # names in one warning
_FLAGS = ("deterministic", "use_running_average")


class SourceLine(NamedTuple):
    """A line of a program."""

    file: str
    line: int


class TracedArguments(NamedTuple):
    """Arguments of a traced function.

    Attributes:
        function: Its name.
        caller: In JAX, the caller of the function that calls it.
        names: The names of the objects in them, by `id`.
        uncounted: The `id` of each Variable whose writes don't count.
    """

    function: str
    caller: _python.ActiveCall
    names: dict[int, str]
    uncounted: set[int]


class WriteLog:
    """Records the writes to the arguments of one call of a function that JAX traces.

    Args:
        function: The call, in JAX, of the function that calls the traced one.
    """

    def __init__(self, function: _python.ActiveCall) -> None:
        self.function = function
        self._arguments: TracedArguments | tuple[()] | None = None  # until needed

    def note(self, writes: dict[int, Any], obj: Any, attribute: str) -> None:
        """Records that an object is being written, if the write counts."""
        frames = [*_python.frames_above(1)]
        if self._arguments is None:
            self._arguments = _arguments(self.function, frames) or ()
        if not self._arguments or id(obj) in self._arguments.uncounted:
            return
        name = self._arguments.names.get(id(obj), f"a {type(obj).__name__}")
        frame = next(filter(_python.is_users, frames), frames[-1])
        source_line = SourceLine(frame.f_code.co_filename, frame.f_lineno)
        written = f"{name}.{attribute}" if attribute else name
        writes.setdefault(id(obj), {})[written] = source_line

    def report(self, writes: dict[int, Any]) -> None:
        """Warns of writes that are lost: the arguments are gone."""
        arguments: Any = self._arguments
        # If the function failed, its arguments live on in the traceback, and go later.
        if arguments.caller not in map(_python.ActiveCall.of, _python.frames_above(0)):
            return
        names: dict[SourceLine, list[str]] = {}
        for written in writes.values():
            for name, source_line in written.items():
                names.setdefault(source_line, []).append(name)
        for source_line, written in names.items():
            text = _message(arguments.function, source_line, written)
            warnings.warn_explicit(
                text, errors.LostUpdateWarning, *source_line, registry=_reported
            )


@hooks.owner_when_unflattened.fill
def _owner() -> Any:
    """Finds the owner of an object being unflattened; called by functions JAX calls."""
    trace = ownership.current()
    if trace is ownership.no_trace:
        return trace
    frame = _jax.caller_of_unflatten()
    if frame is None:  # other code, such as `jax.tree.map`
        return trace
    latest, function = _latest[0](), _python.ActiveCall.of(frame)
    if (
        latest is None
        or latest.trace is not trace
        or latest.write_log.function != function
    ):
        latest = ownership.RebuiltArguments(trace, WriteLog(function))
        _latest[:] = [weakref.ref(latest)]
    return latest


_latest: list[Callable[[], ownership.RebuiltArguments | None]] = [lambda: None]


def _arguments(
    function: _python.ActiveCall, frames: list[FrameType]
) -> TracedArguments | None:
    """Finds the arguments JAX passed; ``None`` if nothing in them can be lost.

    If JAX's own function is no longer running, it has returned the rebuilt arguments.
    They are then the user's, like all objects made by the user.
    """
    running_now = [_python.ActiveCall.of(frame) for frame in frames]
    if function not in running_now or any(map(_jax.is_analysis, frames)):
        return None
    index = running_now.index(function)
    traced = next(x for x in reversed(frames[:index]) if not _jax.is_of_jax(x))
    objects, names = [], dict[int, str]()
    for name, value in [*_python.locals_of(traced).items()]:
        for steps, x in walks.walk(value, _below(names), (ModuleStep(name, name),)):
            names[id(x)] = "".join([step.text for step in steps])
            objects.append(x)
    function_name = traced.f_code.co_qualname.rpartition("<locals>.")[2]
    return TracedArguments(
        function_name, running_now[index + 1], names, _uncounted(objects)
    )


def _below(visited: Container[int]) -> walks.ChildrenOf:
    """Makes a walk into values not visited yet, which stops after many values."""
    remaining = itertools.count(running.MOST_SEEN, -1)

    def below(x: Any, _: Any) -> list[tuple[Any, Any]] | None:
        return None if id(x) in visited or next(remaining) < 0 else running.contents(x)

    return below


def _uncounted(objects: Sequence[Any]) -> set[int]:
    """Collects the state of streams, except those in a Module in training mode."""
    counted, visited = set[int](), set[int]()
    for module in objects:  # the outermost comes first
        if isinstance(module, Module) and id(module) not in visited:
            members = [x for _, x in walks.walk(module, _below(()))]
            visited |= {*map(id, members)}
            if not _is_evaluated(members):
                counted |= {*map(id, members)}
    return {id(x) for x in objects if isinstance(x, RngState)} - counted


def _is_evaluated(objects: Sequence[Any]) -> bool:
    """Whether layers behave differently in training, and none is in training now."""
    modules = [vars(x) for x in objects if isinstance(x, Module)]
    flags = [attributes.get(flag) for attributes in modules for flag in _FLAGS]
    return any(flags) and False not in flags


_reported: dict[Any, Any] = {}


def _message(function: str, source_line: SourceLine, names: list[str]) -> str:
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return errors.message(
        f"`{function}` writes to its arguments, and the writes are lost: JAX gave it "
        "copies, which it does not return.",
        where=f"{', '.join(names[:_MOST])}{more}\nwritten at "
        f"{source_line.file}:{source_line.line}",
        way_out="Use Graftree's transform of the same name, such as nnx.jit for "
        "jax.jit: it carries updates\nback. Or return the object or "
        "nnx.state(object), and update the caller's object with nnx.update.",
    )
