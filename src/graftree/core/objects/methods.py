"""Methods whose calls are tracked, ``__call__`` and those a user names; observers.

    class Net(nnx.Module):
        def __call__(self, x): ...          vars(Net)["__call__"] is a `TrackedMethod`
        def encode(self, x): ...            the function itself, as any other value

To track a method, a `TrackedMethod` stands for its function in the class: it opens a
frame (``running.py``) around each call. To users it looks like that function: it has
its attributes, which are read and written there. Other methods, and functions that are
values in a class, stay as the user wrote them.

An observer sees these calls (`observed`). If it wants all methods, attributes of
Pytrees are read through `_read` while it is there; classes stay as they are.

A program traced in view of observers may hold values that they gave in place of an
output, so it must not be used elsewhere; and they have not seen programs traced before.
Our transforms give JAX functions of the context, which go with it. Everything else that
JAX compiles is kept apart by a number (`TraceNamespace`).
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import itertools
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from graftree import _jax
from graftree.core import pickling
from graftree.core.objects import attributes, running
from graftree.core.objects.running import ModuleCall, ModuleStep, NamedArguments
from graftree.core.variables.variables import Variable

F = TypeVar("F", bound=Callable[..., Any])

# Called with a frame and a function that makes its call; gives the call's result.
Observer = Callable[[ModuleCall, Callable[[], Any]], Any]

# The static attribute of an object whose calls give results in their own floating
# dtype: the last part of a policy. It goes wherever the object goes.
OUTPUT_DTYPE = "_output_dtype"

# Objects of the core are not layers: their methods have names of their own.
_PACKAGE = "graftree.core."
_NO_LAYERS = (_PACKAGE, "collections.")


class TrackedMethod(attributes.Atom):
    """Stands for a function whose calls with an object are tracked.

    Calls with anything else are those of the function.

    Args:
        function: The callable, usually a plain function.
        name: The name of the method.
        adds_name: Whether the name of the method is part of those of JAX's operations.
    """

    __slots__ = ("__weakref__", "_parts")

    def __init__(self, function: Any, name: str, adds_name: bool = False) -> None:
        object.__setattr__(self, "_parts", (function, name, adds_name))

    def __get__(self, obj: Any, owner: type | None = None) -> Any:
        return self if obj is None else types.MethodType(self, obj)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        function, name, adds_name = _parts_of(self)
        if not args or not isinstance(args[0], attributes.DataObject):
            return function(*args, **kwargs)
        stack = running.stack
        above = stack.top
        stack.top = frame = ModuleCall(name, above, args, kwargs, adds_name)
        call = function
        # No local name for its dict: what is held elsewhere can't be watched.
        if OUTPUT_DTYPE in args[0].__dict__:
            if name == "__call__" and not frame.is_repeated:
                call = _cast_results(call, args[0].__dict__[OUTPUT_DTYPE])
        try:
            is_traced = _jax.current_trace() is not _jax.no_trace
            if not is_traced and not stack.observers:
                return call(*args, **kwargs)
            with running.scope(frame) if is_traced else contextlib.nullcontext():
                if stack.observers and not frame.is_repeated:
                    frame.function = function
                    return _observe(frame, call)
                return call(*args, **kwargs)
        except Exception as error:
            running.explain(error, frame, function)
            # Without this method, which tells the user nothing.
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
            raise
        finally:
            stack.top = above

    def __getattribute__(self, name: str) -> Any:
        if name in _OWN:
            return object.__getattribute__(self, name)
        return getattr(_parts_of(self)[0], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_parts_of(self)[0], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_parts_of(self)[0], name)

    def __dir__(self) -> list[str]:
        return dir(_parts_of(self)[0])

    def __repr__(self) -> str:
        return repr(_parts_of(self)[0])

    def __copy__(self) -> TrackedMethod:
        return self

    def __deepcopy__(self, memo: Any) -> TrackedMethod:
        return self

    def __reduce__(self) -> Any:
        # As the function: by its name, or else as a method that a class tracks again.
        if pickling.is_global(self):
            return self.__qualname__
        return function_of, (_parts_of(self)[0],)


# The attributes that are not those of the function; past `__getattribute__`, its parts.
_OWN = frozenset(
    "__call__ __get__ __copy__ __deepcopy__ __reduce__ __reduce_ex__".split()
)
_parts_of: Any = vars(TrackedMethod)["_parts"].__get__


def _cast_results(method: Callable[..., Any], dtype: Any) -> Callable[..., Any]:
    """Casts a method's floating results; objects in them stay as they are."""

    def cast_leaf(x: Any) -> Any:
        is_array = isinstance(x, (jax.Array, np.ndarray))
        is_floating = is_array and jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(dtype) if is_floating and x.dtype != dtype else x

    def is_object(x: Any) -> bool:
        return isinstance(x, (attributes.DataObject, Variable))

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        output = method(*args, **kwargs)
        return jax.tree.map(cast_leaf, output, is_leaf=is_object)

    return call


def function_of(method: Any) -> Any:
    """Returns the function of a `TrackedMethod`; all else is returned as it is."""
    return _parts_of(method)[0] if type(method) is TrackedMethod else method


def is_own(frame: ModuleCall) -> bool:
    """Whether an observed call is of the object's own method of this name.

    Otherwise the object has another one, which has called that of a base class.
    """
    in_class = _in_class(frame.module, frame.method)
    in_class = in_class.func if type(in_class) is functools.partialmethod else in_class
    return function_of(in_class) is frame.function


def _in_class(obj: Any, name: str) -> Any:
    """Returns the value of a name in the class of an object, as it is there."""
    bases = [vars(base) for base in type(obj).__mro__]
    return next((entries[name] for entries in bases if name in entries), None)


def named(method: F) -> F:
    """Makes the calls of a method tracked.

    Raises:
        TypeError: If it is not a plain function, or one that does its work later.
    """
    result = tracked(method)
    if result is method:
        raise TypeError(
            "nnx.debugging.named expects a plain function that does its work when "
            f"it is called, got {method!r}.\n"
            "Apply it below other decorators, directly to the function."
        )
    return result


def tracked(function: Any) -> Any:
    """Tracks the calls of a method by its name, if it is a plain function."""
    if not _is_plain(function):
        return function
    return TrackedMethod(function, function.__name__, adds_name=True)


def as_attribute(cls: type, name: str, value: Any) -> Any:
    """Returns what a class stores for a value that it gets under a name."""
    if name != "__call__" or cls.__module__.startswith(_PACKAGE):
        return value
    if type(value) is functools.partialmethod and _is_plain(value.func):
        method = TrackedMethod(value.func, name)
        return functools.partialmethod(method, *value.args, **value.keywords)
    return TrackedMethod(value, name) if _is_call(value) else value


def _is_plain(method: Any) -> bool:
    # A generator or coroutine does its work later.
    kinds = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
    is_function = type(method) is types.FunctionType
    return is_function and not method.__code__.co_flags & kinds


def _is_call(method: Any) -> bool:
    """Whether a method does its work when called; ``jax.jit`` may have made it."""
    return _is_plain(method) or type(method) is _COMPILED


_COMPILED = type(jax.jit(len))


def has_known_call(obj: Any) -> bool:
    """Whether calls of an object are tracked."""
    call = inspect.getattr_static(type(obj), "__call__", None)
    return type(getattr(call, "func", call)) is TrackedMethod


def is_public(name: str) -> bool:
    """Whether a method of this name may be shown to observers."""
    return name == "__call__" or not name.startswith("_")


def observable(method: F) -> F:
    """Makes a method of random streams observable; it names no operations."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not running.stack.shows_draws:
            return method(*args, **kwargs)
        return TrackedMethod(method, method.__name__)(*args, **kwargs)

    return cast("F", run)


# Observers.


@contextlib.contextmanager
def observed(
    observer: Observer,
    *roots: Any,
    shows_methods: bool = False,
    shows_draws: bool = False,
    keeps_apart: bool = True,
) -> Iterator[None]:
    """Shows an observer the calls of methods of Pytrees in this thread.

    It is called as ``observer(frame, call)`` and returns the output of the method:
    ``call()``, or something else. The paths of objects in ``roots`` begin there: the
    key of the first step is the object itself. Functions that `jit` has compiled are
    traced again in the context, and their traces there are not used elsewhere.

    Args:
        observer: It sees the calls of ``__call__`` and of methods that are named.
        *roots: Objects.
        shows_methods: Whether it sees those of all public methods, too.
        shows_draws: Whether it sees those of random streams, too.
        keeps_apart: Whether traces in its view are kept apart from others. It needs
            that unless the structure of the arguments says what it does with them.
    """
    stack = running.stack
    former = vars(stack).copy()
    if roots:
        named = [(ModuleStep(root, type(root).__name__), root) for root in roots]
        stack.top = NamedArguments(lambda: named, stack.top)
    stack.observers = (*stack.observers, observer)
    stack.shows_draws |= shows_draws
    stack.shows_methods |= shows_methods
    reading = _track_methods_read() if shows_methods else contextlib.nullcontext()
    shown = stack.shows_methods, stack.shows_draws
    namespace = (
        TraceNamespace(*shown)
        if keeps_apart
        else contextlib.nullcontext(stack.trace_namespace)
    )
    try:
        with namespace as stack.trace_namespace, reading:
            yield
    finally:
        vars(stack).clear()
        vars(stack).update(former)


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Shows no observer the calls in a context, which only ask for shapes or dtypes."""
    before, running.stack.observers = running.stack.observers, ()
    try:
        yield
    finally:
        running.stack.observers = before


def _observe(frame: ModuleCall, method: Callable[..., Any]) -> Any:
    """Calls the method of a frame in view of the observers, the latest one first."""
    if running.stack.trace_namespace is not None:
        running.stack.trace_namespace.note_call()
    call = functools.partial(method, *frame.positional, **frame.kwargs)
    for observer in running.stack.observers:
        call = functools.partial(observer, frame, call)
    return call()


class TraceNamespace:
    """Keeps apart the traces made in view of some observers; a context.

    Its number serves later contexts, too, with the programs that JAX compiled for it;
    unless some were traced in view of observers, by ``jax.jit`` itself, for example.

    Args:
        *shown: Whether all methods, and draws, are shown. A program in which nothing
            was seen may hold calls that others would see, so each kind has its numbers.
    """

    def __init__(self, *shown: bool) -> None:
        with _lock:
            self._free = free = _free[shown]
            self._id = free.pop() if free else next(_new_numbers)
        self._programs = _jax.traced_apart(self._id)
        self._functions: dict[Any, tuple[list[Any], Callable[..., Any]]] = {}
        self._objects: list[Any] = []
        # Traces whose programs go with this context, or with one around it.
        self._own_traces = {_jax.recording_trace()}
        self._is_kept = False

    def __enter__(self) -> TraceNamespace:
        self._programs.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._programs.__exit__(*error)
        if not self._is_kept:
            with _lock:
                self._free.append(self._id)

    def note_transform(self, args: Any, kwargs: Any) -> None:
        """Notes a call of a transform of ours with these arguments."""
        self.note_call()
        argument_contents = running.contents([*args, kwargs])
        self._objects = [x for _, x in running.next_below(argument_contents)]

    def function(
        self, owner: Any, make: Callable[[], Callable[..., Any]]
    ) -> Callable[..., Any]:
        """Returns the function for JAX to call here instead of one compiled for others.

        It is for the objects of the call noted last: JAX would not trace it again for
        others that are alike.

        Args:
            owner: The object whose function it is.
            make: Makes it.
        """
        if _jax.current_trace() is not _jax.no_trace:
            return make()  # in a trace each call has objects of its own
        key = owner, *map(id, self._objects)
        if key not in self._functions:
            self._functions[key] = self._objects, make()
        return self._functions[key][1]

    def note_trace(self) -> None:
        """Notes a trace of ours: its program is not kept for others."""
        self._own_traces.add(_jax.recording_trace())

    def note_call(self) -> None:
        """Notes a call that observers may see: JAX may keep its trace."""
        if not self._is_kept:
            self._is_kept = _jax.recording_trace() not in self._own_traces


# Numbers that no context has now, by the kinds of calls shown. The one returned last is
# used first, so that nested contexts get the same numbers again.
_free: dict[tuple[bool, ...], list[int]] = collections.defaultdict(list)
_new_numbers = itertools.count(1)
# How many contexts show all methods, in any thread.
_readers = 0
# Guards these three.
_lock = threading.Lock()


@contextlib.contextmanager
def _track_methods_read() -> Iterator[None]:
    """Tracks, in a context, all methods that are read from Pytrees."""
    global _readers
    with _lock:
        _readers += 1
        type.__setattr__(attributes.DataObject, "__getattribute__", _read)
    try:
        yield
    finally:
        with _lock:
            _readers -= 1
            if _readers == 0:
                type.__delattr__(attributes.DataObject, "__getattribute__")


def _read(self: Any, name: str) -> Any:
    """Reads an attribute as observers of all methods want it."""
    value = super(attributes.DataObject, self).__getattribute__(name)
    if (
        running.stack.shows_methods
        and type(value) is types.MethodType
        and value.__self__ is self
        and not name.startswith("_")
        and _in_class(self, name) is value.__func__
        and _is_call(value.__func__)
        and not str(value.__func__.__module__).startswith(_NO_LAYERS)
    ):
        method = TrackedMethod(value.__func__, name, adds_name=True)
        return types.MethodType(method, self)
    return value
