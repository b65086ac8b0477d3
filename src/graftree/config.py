"""Flags of the library, for the process or for a block.

    nnx.config.update("nnx_graph_mode", False)   # for every thread, from now on
    with nnx.set_graph_mode(False): ...          # for a block, in this thread

A flag is an attribute of this module (``config.nnx_graph_mode``). Its first value
comes from the environment variable of the same name in upper case, read at import.
`update` changes it for every thread. A subclass of `ScopedDefault` puts a stack of
thread-local values on top of one flag; a value on the stack wins.

A function that is traced reads some of these values, and its program holds them. So
they are part of the key under which JAX remembers programs: `jax.jit` retraces where
another value is in force.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from graftree import _jax

_TRUE = frozenset({"y", "yes", "t", "true", "on", "1"})
_FALSE = frozenset({"n", "no", "f", "false", "off", "0"})


def _parse_bool(name: str, text: str) -> bool:
    lowered = text.lower()
    if lowered in _TRUE or lowered in _FALSE:
        return lowered in _TRUE
    raise ValueError(
        f"Invalid value {text!r} of the environment variable {name}: "
        f"expected one of {sorted(_TRUE | _FALSE)}."
    )


def _parse_optional_int(name: str, text: str) -> int | None:
    if not text or text.lower() == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"Invalid value {text!r} of the environment variable {name}: "
            "expected an integer or 'none'."
        ) from None


# Flag name: (default, parser of the environment variable).
_FLAGS: dict[str, tuple[Any, Callable[[str, str], Any]]] = {
    "nnx_graph_mode": (True, _parse_bool),
    "nnx_graph_updates": (True, _parse_bool),
    "nnx_sow_capture_noop": (False, _parse_bool),
    "flax_always_shard_variable": (True, _parse_bool),
    "flax_hijax_variable": (False, _parse_bool),
    "flax_array_ref": (False, _parse_bool),
    "flax_pytree_module": (True, _parse_bool),
    "flax_max_repr_depth": (None, _parse_optional_int),
    # Whether operations are named after the modules that they are in.
    "graftree_named_scopes": (True, _parse_bool),
    # A longer repr is written in the compact form; None: never.
    "graftree_repr_lines": (150, _parse_optional_int),
    # Whether anything is remembered between two calls to make the second one fast.
    "graftree_caches": (True, _parse_bool),
    # Programs for Flax set these; nothing here depends on them.
    "flax_use_flaxlib": (False, _parse_bool),
    "flax_filter_frames": (True, _parse_bool),
    "flax_profile": (True, _parse_bool),
    "flax_use_orbax_checkpointing": (True, _parse_bool),
    "flax_preserve_adopted_names": (False, _parse_bool),
    "flax_return_frozendict": (False, _parse_bool),
    "flax_fix_rng_separator": (False, _parse_bool),
}

# The others set how texts look, or nothing.
_READ_IN_TRACES = (
    *("nnx_graph_mode", "nnx_graph_updates", "nnx_sow_capture_noop"),
    *("flax_always_shard_variable", "flax_hijax_variable", "flax_array_ref"),
    *("flax_pytree_module", "graftree_named_scopes"),
)


def _from_environment(name: str) -> Any:
    default, parse = _FLAGS[name]
    text = os.environ.get(name.upper())
    return default if text is None else parse(name.upper(), text)


_values: dict[str, Any] = {name: _from_environment(name) for name in _FLAGS}
_first_values = {(name, _values[name]) for name in _READ_IN_TRACES}


class Caches:
    """All that is remembered between two calls, behind one switch.

    Nothing depends on a cache but time: results, errors and warnings are the same
    without. Each is entered at one function, which does the work itself where caches
    are not in use.

    Attributes:
        are_used: The flag ``graftree_caches``, which costs nothing to read here.
    """

    def __init__(self, are_used: bool) -> None:
        self.are_used = are_used
        # By `id`: mappings among them have no hash.
        self._caches: weakref.WeakValueDictionary[int, Any]
        self._caches = weakref.WeakValueDictionary()

    def add(self, cache: Any) -> None:
        """Has ``cache.clear()`` called where caches are switched off."""
        self._caches[id(cache)] = cache

    def switch(self, are_used: bool) -> None:
        """Sets the flag; switched off, all caches are empty."""
        self.are_used = are_used
        if not are_used:
            for cache in [*self._caches.values()]:
                cache.clear()


caches = Caches(_values["graftree_caches"])


def __getattr__(name: str) -> Any:
    try:
        return _values[name]
    except KeyError:
        raise AttributeError(f"There is no configuration flag {name!r}.") from None


def flags() -> frozenset[str]:
    """Lists the names of all flags."""
    return frozenset(_FLAGS)


def update(name: str, value: Any, /) -> None:
    """Sets a flag for the whole process.

    Args:
        name: The flag, e.g. ``"nnx_graph_mode"``.
        value: Its new value.

    Raises:
        LookupError: If there is no such flag.

    Example:
        >>> nnx.config.update("flax_max_repr_depth", 2)
        >>> nnx.config.flax_max_repr_depth
        2
        >>> nnx.config.update("flax_max_repr_depth", None)
    """
    if name not in _values:
        raise LookupError(
            f"There is no configuration flag {name!r}; the flags are {sorted(_values)}."
        )
    _values[name] = value
    if name == "graftree_caches":
        caches.switch(value)
    if name in _READ_IN_TRACES:
        flags_in_traces = {(name, _values[name]) for name in _READ_IN_TRACES}
        _jax.trace_under_flags(flags_in_traces - _first_values)


@contextlib.contextmanager
def temp_flip_flag(var_name: str, var_value: Any) -> Iterator[None]:
    """Sets a flag for the whole process while the context lasts.

    Args:
        var_name: The flag; you may leave out ``flax_`` at its start.
        var_value: Its value in the context.

    Raises:
        AttributeError: If there is no such flag.

    Example:
        >>> with nnx.config.temp_flip_flag("max_repr_depth", 2):
        ...     nnx.config.flax_max_repr_depth
        2
    """
    name = var_name if var_name in _values else f"flax_{var_name}"
    former = __getattr__(name)
    update(name, var_value)
    try:
        yield
    finally:
        update(name, former)


def disable_caches() -> contextlib.AbstractContextManager[None]:
    """Runs a block without anything that Graftree remembers between two calls.

    Results, errors, warnings and what is written to objects are the same with and
    without; only time differs. If they do differ, a cache is wrong: please report it.

    It holds for the whole process, all threads. What JAX has compiled for a function of
    `nnx.jit` or `jax.jit` stays. The flag ``graftree_caches`` and the environment
    variable ``GRAFTREE_CACHES=off`` switch the same off for good.

    Returns:
        A context, or a decorator of a function.

    Example:
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> with nnx.debugging.disable_caches():
        ...     nnx.split(model)[0] == nnx.split(model)[0]
        True
    """
    return temp_flip_flag("graftree_caches", False)


class _Stacks(threading.local):
    """One stack of values per subclass of `ScopedDefault`, in each thread.

    Attributes:
        of: The stacks.
        read: The values that traces of the thread read, by name.
    """

    def __init__(self) -> None:
        self.of: dict[type, list[Any]] = {}
        self.read: dict[str, Any] = {}


_stacks = _Stacks()


def trace_under(name: str, value: Any) -> None:
    """Sets a value that this thread's traces read from now on; ``None`` is the default.

    Args:
        name: The name to read it by.
        value: Its value, hashable.

    Example:
        >>> nnx.config.trace_under("policy", ("float32", "bfloat16"))
        >>> nnx.config.trace_under("policy", None)
    """
    if value is None:
        _stacks.read.pop(name, None)
    else:
        _stacks.read[name] = value
    # A value that equals the flag's stays in: the flag may change.
    _jax.trace_under_defaults(_stacks.read.items())


class ScopedDefault:
    """A thread-local default: a plain call sets it, ``with`` and ``@`` scope it.

    Constructing one sets the value at once. A ``with`` statement undoes it on exit; as
    a decorator, it holds only during calls. A plain call inside a ``with`` block lasts
    until that block ends.

    Attributes:
        prev_value: The value in force before.
        new_value: The value that this object sets.

    Example:
        >>> issubclass(nnx.set_graph_mode, nnx.config.ScopedDefault)
        True
    """

    flag: ClassVar[str]

    def __init__(self, value: Any, /) -> None:
        self.prev_value = self.current_value()
        self.new_value = value
        stack = _stacks.of.setdefault(type(self), [])
        self._replaced_value = bool(stack)
        self._set_by_call = True
        if stack:
            stack[-1] = value
        else:
            stack.append(value)
        self._note()

    @classmethod
    def current_value(cls) -> Any:
        """Value in force in this thread: the innermost set one, else the flag's."""
        stack = _stacks.of.get(cls)
        return stack[-1] if stack else _values[cls.flag]

    @classmethod
    def get_default(cls) -> Any:
        """Returns the value of the flag, in force where nothing is set."""
        return _values[cls.flag]

    @classmethod
    def get_stack(cls) -> list[Any]:
        """Returns the values set in this thread, the innermost last."""
        return _stacks.of.setdefault(cls, [])

    def __enter__(self) -> None:
        self._take_back()
        _stacks.of.setdefault(type(self), []).append(self.new_value)
        self._note()

    def __exit__(self, *exception: object) -> None:
        _stacks.of[type(self)].pop()
        self._note()

    def __call__(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """Decorates a function to run under the value; the ambient one comes back."""
        self._take_back()

        @functools.wraps(f)
        def scoped(*args: Any, **kwargs: Any) -> Any:
            with type(self)(self.new_value):
                return f(*args, **kwargs)

        return scoped

    def _take_back(self) -> None:
        # The constructor can't know that it is part of a `with` or a decorator.
        if not self._set_by_call:
            return
        self._set_by_call = False
        stack = _stacks.of[type(self)]
        if self._replaced_value:
            stack[-1] = self.prev_value
        else:
            stack.pop()
        self._note()

    @classmethod
    def _note(cls) -> None:
        """Tells JAX the values in force in this thread."""
        stack = _stacks.of[cls]
        trace_under(cls.__name__, stack[-1] if stack else None)


class set_graph_mode(ScopedDefault):
    """Sets whether objects are graphs (shared references kept) or trees by default.

    Args:
        value: ``True`` for graph mode, ``False`` for tree mode.

    Example:
        >>> with nnx.set_graph_mode(False):
        ...     nnx.set_graph_mode.current_value()
        False
        >>> nnx.set_graph_mode.current_value()
        True
    """

    flag = "nnx_graph_mode"


class set_graph_updates(ScopedDefault):
    """Sets whether structural changes in transforms reach the caller's objects.

    Args:
        value: ``True`` to propagate added, removed and replaced attributes.

    Example:
        >>> with nnx.set_graph_updates(False):
        ...     nnx.set_graph_updates.current_value()
        False
    """

    flag = "nnx_graph_updates"


def in_force() -> tuple[Any, ...]:
    """Returns all flags and scoped defaults, as they are in this thread."""
    scoped = [(kind, stack[-1]) for kind, stack in _stacks.of.items() if stack]
    return (*_values.values(), *scoped)


def graph_mode(graph: bool | None) -> bool:
    """Resolves a ``graph`` argument: ``None`` means the default now in force."""
    return set_graph_mode.current_value() if graph is None else graph


# The mode of a transform.


@dataclasses.dataclass(frozen=True)
class Propagation:
    """Which changes survive the way back out of a transform.

    Attributes:
        sharing: Whether shared references stay shared (graph mode); else objects are
            trees and aliases are errors.
        structure: Whether added, removed and replaced attributes reach the caller's
            objects; else only the values of Variables do.
    """

    sharing: bool
    structure: bool


TREE = Propagation(sharing=False, structure=False)
GRAPH = Propagation(sharing=True, structure=False)
GRAPH_UPDATES = Propagation(sharing=True, structure=True)


def propagation(graph: bool | None, graph_updates: bool | None) -> Propagation:
    """Returns the mode by a transform's arguments or, without them, by the defaults."""
    if not graph_mode(graph):
        return TREE
    if graph_updates is None:
        graph_updates = set_graph_updates.current_value()
    return GRAPH_UPDATES if graph_updates else GRAPH
