"""Methods whose calls are known: ``__call__``, and those that a user names.

    class Net(nnx.Module):
        def __call__(self, x): ...          vars(Net)["__call__"] is a `Known`
        def encode(self, x): ...            the function itself, as any other value

For a method to be known, a `Known` stands for its function in the class: it opens a
frame (``running.py``) around each call. To whoever looks at it it is that function: it
has its attributes, which are read and written there. Other methods, and functions that
are values in a class, stay what the user wrote.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, TypeVar, cast

from graftree import _jax
from graftree.core.objects import attributes, failures, outputs, running
from graftree.core.objects.attributes import DataObject

F = TypeVar("F", bound=Callable[..., Any])

# Objects of the core are no layers: their methods have names of their own.
_PACKAGE = "graftree.core."


class Known:
    """Stands for a function whose calls with an object are known.

    Calls with anything else are those of the function.

    Args:
        function: What is called: mostly a plain function.
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
        if not args or not isinstance(args[0], DataObject):
            return function(*args, **kwargs)
        stack = running.stack
        above = stack.top
        stack.top = frame = running.Frame(name, above, args, kwargs, adds_name)
        call = function
        if outputs.DTYPE in args[0].__dict__ and frame.gives_output:
            call = outputs.casting(call, args[0].__dict__[outputs.DTYPE])
        try:
            if _jax.current_trace() is _jax.no_trace and not stack.observers:
                return call(*args, **kwargs)
            with running.scope(frame):
                if stack.observers and not frame.is_repeated:
                    return running.observe(frame, call)
                return call(*args, **kwargs)
        except Exception as error:
            failures.explain(error, frame, function)
            # Without this method, which says nothing to the user.
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

    def __copy__(self) -> Known:
        return self

    def __deepcopy__(self, memo: Any) -> Known:
        return self

    def __reduce__(self) -> Any:
        # As the function: by its name, or else as what a class makes known again.
        if _global_value(self.__module__, self.__qualname__) is self:
            return self.__qualname__
        return function_of, (_parts_of(self)[0],)


# The attributes that are not those of the function; past `__getattribute__`, its parts.
_OWN = frozenset(
    "__call__ __get__ __copy__ __deepcopy__ __reduce__ __reduce_ex__".split()
)
_parts_of: Any = vars(Known)["_parts"].__get__

# As a function, it is a static attribute wherever it is assigned.
attributes.ATOMS.add(Known)


def function_of(method: Any) -> Any:
    """The function that a `Known` stands for; all else is returned as it is."""
    return _parts_of(method)[0] if type(method) is Known else method


def _global_value(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def named(method: F) -> F:
    """Makes the calls of a method known.

    Raises:
        TypeError: If it is no plain function, or one that does later what it does.
    """
    if not _is_plain(method):
        raise TypeError(
            "nnx.debugging.named expects a method written with `def`, which returns "
            f"what it computes, got {method!r}.\n"
            "Put it below other decorators, at the function."
        )
    return cast("F", known(method))


def known(function: Any) -> Any:
    """A method whose calls are known by its name, if it is a plain function."""
    if not _is_plain(function):
        return function
    return Known(function, function.__name__, adds_name=True)


def know_calls(cls: type) -> None:
    """Makes the calls of objects of a class known, if it says what a call does."""
    if "__call__" in vars(cls):
        written = vars(cls)["__call__"]
        type.__setattr__(cls, "__call__", as_attribute(cls, "__call__", written))


def as_attribute(cls: type, name: str, value: Any) -> Any:
    """What stands in a class for a value that it gets under a name."""
    if name != "__call__" or cls.__module__.startswith(_PACKAGE):
        return value
    if type(value) is functools.partialmethod and _is_plain(value.func):
        known = Known(value.func, name)
        return functools.partialmethod(known, *value.args, **value.keywords)
    return Known(value, name) if _is_plain(value) else value


def _is_plain(method: Any) -> bool:
    # What a generator or coroutine does, it does later.
    return (
        type(method) is types.FunctionType
        and not inspect.isgeneratorfunction(method)
        and not inspect.iscoroutinefunction(method)
        and not inspect.isasyncgenfunction(method)
    )


def has_known_call(obj: Any) -> bool:
    """Whether calls of an object are known."""
    call = static(obj, "__call__")
    return type(getattr(call, "func", call)) is Known


def static(obj: Any, name: str) -> Any:
    """What the class of an object has under a name, ``None`` if it has nothing."""
    found = [vars(x)[name] for x in type(obj).__mro__ if name in vars(x)]
    return found[0] if found else None


def is_public(name: str) -> bool:
    """Whether a method of this name may be shown to observers."""
    return name == "__call__" or not name.startswith("_")


def shown(obj: Any, name: str, value: Any) -> Any:
    """An attribute as observers of all methods want it: a method is a known one."""
    if (
        type(value) is types.MethodType
        and value.__self__ is obj
        and not name.startswith("_")
        and static(obj, name) is value.__func__
        and _is_plain(value.__func__)
        and not str(value.__func__.__module__).startswith(_PACKAGE)
    ):
        return types.MethodType(Known(value.__func__, name, adds_name=True), obj)
    return value


def observable(method: F) -> F:
    """A method of random streams: it names no operations, but may be observed."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not running.stack.shows_draws:
            return method(*args, **kwargs)
        return Known(method, method.__name__)(*args, **kwargs)

    return cast("F", run)
