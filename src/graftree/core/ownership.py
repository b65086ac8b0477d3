"""Traces own objects: which one may be written, and when it last changed.

A Variable or Pytree belongs to the trace in which it was made (or unflattened, merged,
copied). Only that trace may write it: a write from an inner trace would leave a tracer
in an object that outlives the trace. Reading is always allowed.

Arguments that JAX itself rebuilds for a function that it traces belong to
`RebuiltArguments`, which stand for the trace and note each write: a value that nothing
reads before the function returns is lost.

Versions show whether anything has changed since. Every structural mutation of an object
(an attribute set or deleted, a container changed, metadata replaced; not the value of a
Variable) takes the next number of one counter for all objects and writes it on the
object. No number is given twice, so equal numbers mean that nothing has changed in
between.

The mutation comes first and the version after it: code that reads the latest version
before that is written sees a number that will be outdated.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from graftree import _jax, errors
from graftree.core import hooks

# The token of the innermost trace; an object's owner is compared with it by identity.
current, no_trace = _jax.current_trace, _jax.no_trace


class RebuiltArguments:
    """Owns the arguments that JAX rebuilt for one call of a function that it traces.

    The arguments hold it, and it holds none of them, so it goes when they go.

    Args:
        trace: The token of the trace.
        write_log: Decides which writes count, and reports those that nothing has read:
            a ``debugging.lost_updates.WriteLog``.

    Attributes:
        writes: The writes not read since, by the `id` of the object.
    """

    __slots__ = ("__weakref__", "trace", "write_log", "writes")

    def __init__(self, trace: Any, write_log: Any) -> None:
        self.trace, self.write_log = trace, write_log
        self.writes: dict[int, Any] = {}

    def note_write(self, obj: Any, attribute: str = "") -> None:
        """Notes that a Variable, or an attribute of an object, is written now."""
        errors.fenced(self.write_log.note, self.writes, obj, attribute)
        if self.writes:
            unread.add(id(self))

    def note_read(self, obj: Any) -> None:
        """Notes that an object is taken apart, as the result of a function is."""
        self.writes.pop(id(obj), None)

    def __del__(self) -> None:
        if self.writes:
            unread.discard(id(self))
            errors.fenced(self.write_log.report, self.writes)


# Owners with writes that nothing has read. Usually empty, which is quick to check.
unread = set[int]()


def is_current(owner: Any) -> bool:
    """Whether this owner stands for the current trace."""
    trace = current()
    return owner is trace or (type(owner) is RebuiltArguments and owner.trace is trace)


def token_of(owner: Any) -> Any:
    """Returns the token of the trace that an owner stands for."""
    return owner.trace if type(owner) is RebuiltArguments else owner


def _name(obj: Any) -> str:
    """Finds where running functions reach an object: ``model.layers[0].weight``."""
    return errors.fenced(hooks.path_of_object.call, obj) or ""


_WAY_OUT = (
    "Pass the object as an argument of the transformed function, so that it belongs\n"
    "to its trace and the update is returned, or make it inside that function,\n"
    "e.g. with nnx.merge(..., copy=True)."
)


def variable_error(variable: Any, path: str = "") -> errors.TraceContextError:
    """Builds the error for writing a Variable of another trace."""
    headline = f"Cannot mutate {type(variable).__name__} from a different trace level."
    path = path or _name(variable)
    return errors.TraceContextError(_message(headline, path, _WAY_OUT))


def object_error(obj: Any, attribute: str | None = None) -> errors.TraceContextError:
    """Builds the error for changing an attribute of an object of another trace."""
    headline = f"Cannot mutate '{type(obj).__name__}' from different trace level."
    attribute_lines = [] if attribute is None else [f"attribute {attribute!r}"]
    message = _message(headline, _name(obj), _WAY_OUT, *attribute_lines)
    return errors.TraceContextError(message)


def read_only_error(variable: Any, path: str = "") -> errors.ImmutableVariableError:
    """Builds the error for writing a Variable that was made read-only."""
    headline = f"Cannot write this {type(variable).__name__}: it was made read-only."
    way_out = "Use nnx.with_vars(node, mutable=True) to undo that."
    return errors.ImmutableVariableError(_message(headline, path, way_out))


def lost_update_error(variable: Any, path: str = "") -> errors.ImmutableVariableError:
    """Builds the error for writing a Variable that is read-only in this trace."""
    kind = type(variable).__name__
    headline = (
        f"Cannot update a non-ref HijaxVariable ({kind}) inside a JAX transform: "
        "the update would be lost."
    )
    way_out = f"Make it with ref=True: nnx.{kind}(value, hijax=True, ref=True)."
    return errors.ImmutableVariableError(_message(headline, path, way_out))


def _message(headline: str, path: str, way_out: str, *lines: str) -> str:
    locations = [*lines, f"at {path}"] if path else lines
    return errors.message(headline, where="\n".join(locations), way_out=way_out)


class TraceState:
    """A snapshot of the current trace.

    Attributes:
        jax_trace: An opaque token of the trace; tokens are compared by identity.

    Example:
        >>> state = nnx.tracers.TraceState()
        >>> state.is_valid()
        True
        >>> jax.jit(lambda: state.is_valid())().item()
        False
    """

    __slots__ = ("jax_trace",)
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __init__(self) -> None:
        self.jax_trace = current()

    @property
    def _jax_trace(self) -> Any:
        return self.jax_trace

    @_jax_trace.setter
    def _jax_trace(self, token: Any) -> None:
        self.jax_trace = token

    def is_valid(self) -> bool:
        """Whether the trace of the snapshot is still the current one."""
        return self.jax_trace is current()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TraceState) and self.jax_trace is other.jax_trace

    def __reduce__(self) -> Any:
        return TraceState, ()

    def __setstate__(self, state: Any) -> None:
        """Takes a new snapshot: pickles of Flax NNX have a state."""
        self.jax_trace = current()


def snapshot() -> TraceState:
    """Takes a snapshot of the current trace: the latest one, if the trace is the same.

    A pickle of many Variables then has one.
    """
    latest = _snapshots[0]
    if not latest.is_valid():
        _snapshots[0] = latest = TraceState()
    return latest


_snapshots = [TraceState()]


class Owner(TraceState):
    """Trace that owns a Variable; assigning a token changes the owner."""

    __slots__ = ("_read", "_write")

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        self._read, self._write = read, write

    @property
    def jax_trace(self) -> Any:
        """An opaque token of the trace."""
        return self._read()

    @jax_trace.setter
    def jax_trace(self, token: Any) -> None:
        self._write(token)


# Pytrees without leaves; unflattening one takes a new snapshot.
_jax.register_leafless(TraceState)
_jax.register_leafless(Owner)


_numbers = itertools.count(1)


class _Versions:
    """Holds the latest version of any object."""

    __slots__ = ("latest",)

    def __init__(self) -> None:
        self.latest = 0


versions = _Versions()


def touch(obj: Any) -> None:
    """Gives ``obj`` the next number; call it after the mutation."""
    # next() is atomic, so that two threads never share a number.
    obj.version = version = next(_numbers)
    versions.latest = version


def touch_slot(write: Callable[[Any, int], None], obj: Any) -> None:
    """Does as `touch` for an object whose version is written by a function."""
    version = next(_numbers)
    write(obj, version)
    versions.latest = version
