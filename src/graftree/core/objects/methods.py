"""Methods of Pytrees, wrapped so that it is known which object runs.

Each class gets its own public methods, and ``__call__``, in a wrapper when it is made.
The wrapper is a function like the method to `inspect`, pickle and subclasses; it stands
in no traceback. What it does is in `running.py`; it finds that through the module, so
that cloudpickle can take it along with a class by value.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, TypeVar, cast

from graftree import _jax
from graftree.core.objects import failures, outputs, running

F = TypeVar("F", bound=Callable[..., Any])

# Objects of the core are no layers: their methods have names of their own.
_PACKAGE = "graftree.core."


def name_methods(cls: type) -> None:
    """Wraps the methods that stand in a class."""
    if not cls.__module__.startswith(_PACKAGE):
        for name, attribute in [*vars(cls).items()]:
            if _is_method(name, attribute):
                type.__setattr__(cls, name, named(attribute))


def is_public(name: str) -> bool:
    """Whether calls of a method of this name are known."""
    return name == "__call__" or not name.startswith("_")


def _is_method(name: str, attribute: Any) -> bool:
    # What a generator or coroutine does, it does later.
    return (
        is_public(name)
        and type(attribute) is types.FunctionType
        and not inspect.isgeneratorfunction(attribute)
        and not inspect.iscoroutinefunction(attribute)
        and not inspect.isasyncgenfunction(attribute)
    )


def is_named(obj: Any) -> bool:
    """Whether calls of an object are known: it has a plain method ``__call__``."""
    mro = type(obj).__mro__
    call = next((vars(x)["__call__"] for x in mro if "__call__" in vars(x)), None)
    return type(call) is types.FunctionType and hasattr(call, "__wrapped__")


def named(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method during which its object is the running one."""
    name = method.__name__
    # The results of a call may be cast, those of other methods not.
    attribute = outputs.DTYPE if name == "__call__" else ""

    @functools.wraps(method)
    def run(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        stack = running.stack
        above = stack.top
        stack.top = frame = running.Frame(self, name, above, args, kwargs)
        call = method
        if attribute in self.__dict__ and not frame.is_repeated:
            call = outputs.casting(method, self.__dict__[attribute])
        try:
            if _jax.current_trace() is _jax.no_trace and not stack.observers:
                return call(self, *args, **kwargs)
            with running.scope(frame):
                if stack.observers and not frame.is_repeated:
                    return running.observe(frame, call)
                return call(self, *args, **kwargs)
        except Exception as error:
            failures.explain(error, frame, method)
            # Without this function, which says nothing to the user.
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
            raise
        finally:
            stack.top = above

    return run


def observable(method: F) -> F:
    """A method of random streams: it names no operations, but may be observed."""

    @functools.wraps(method)
    def run(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not running.stack.shows_draws:
            return method(self, *args, **kwargs)
        return running.watch(self, method.__name__, method, args, kwargs)

    return cast("F", run)
