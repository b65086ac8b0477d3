"""What all transforms share as decorators: forms of use, signatures, bound methods."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import (
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    cast,
    overload,
)

from graftree.core.modules.modules import Module
from graftree.core.objects import methods, running
from graftree.core.objects.attributes import DataObject
from graftree.core.pickling import Rebuilt

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
Options = ParamSpec("Options")

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "<required>"})()


class Method(Generic[P, R]):
    """The base of transformed functions that a class may hold as its methods."""

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(
        self: Method[Concatenate[Any, Q], R], instance: Any, owner: type | None = None
    ) -> Callable[Q, R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        function: Any = self
        return self if instance is None else functools.partial(function, instance)

    def seen(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Calls it in view of the observers, as a method of an object."""
        return methods.Known(self, name_of(self))(*args, **kwargs)

    def is_unseen(self, args: tuple[Any, ...]) -> bool:
        """Whether observers don't know yet that it runs, as a method of an object."""
        stack, name = running.stack, name_of(self)
        if not (stack.observers and args and methods.is_public(name)):
            return False
        obj, above = args[0], stack.top
        return (
            isinstance(obj, DataObject)
            and inspect.getattr_static(type(obj), name, None) is self
            and not (above and above.module is obj and above.method == name)
        )


class Transform(Protocol[Options]):
    """The type of a transform that keeps the type of its function.

    It takes the function first, or is a decorator without it.
    """

    @overload
    def __call__(
        self, f: Callable[P, R], /, *args: Options.args, **options: Options.kwargs
    ) -> Callable[P, R]: ...
    @overload
    def __call__(
        self, *args: Options.args, **options: Options.kwargs
    ) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def keeps_type(
    transform: Callable[Concatenate[Any, Options], Any],
) -> Transform[Options]:
    """Declares a transform to be a `Transform`, with the options that it has."""
    return cast("Transform[Options]", transform)


def decorate(f: Any, transform: str, make: Callable[[Any], Any]) -> Any:
    """What a transform returns, used with parentheses or without."""

    def checked(function: Any) -> Any:
        check_not_bound(function, transform)
        return make(function)

    return checked if f is MISSING else checked(f)


def check_not_bound(function: Any, transform: str) -> None:
    """Refuses methods that are bound to a Module: its updates would be lost."""
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    if inspect.ismethod(inner) and isinstance(inner.__self__, Module):
        owner = type(inner.__self__).__name__
        raise ValueError(
            f"nnx.{transform} does not support bound methods, got "
            f"{owner}.{inner.__name__} of an instance: the instance would be a "
            "constant.\n"
            f"Decorate the method with @nnx.{transform}, or call "
            f"nnx.{transform}({owner}.{inner.__name__})(instance, ...)."
        )


def to_positions(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    count: int = 0,
) -> tuple[Any, ...]:
    """Turns keyword arguments into positional ones, defaults included.

    Args:
        function: Whose signature tells the positions.
        args: The positional arguments.
        kwargs: The keyword arguments.
        count: How many a prefix is for; defaults fill up to that without keywords, too.

    Returns:
        All arguments by position; ``args`` if there is nothing to add.

    Raises:
        TypeError: If a keyword argument has no position.
    """
    if not kwargs and len(args) >= count:
        return args
    if isinstance(function, functools.partial):
        if kwargs:
            raise _unresolvable(function, kwargs)
        return args
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    if bound.kwargs.keys() & kwargs.keys():
        raise _unresolvable(function, bound.kwargs)
    return bound.args


def _unresolvable(function: Any, kwargs: Mapping[str, Any]) -> TypeError:
    return TypeError(
        f"The keyword arguments could not be resolved to positions: {sorted(kwargs)} "
        f"of {name_of(function)}. Pass them by position."
    )


def name_of(function: Any) -> str:
    """The name of a function for messages."""
    return getattr(function, "__name__", repr(function))


def wraps(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """``functools.wraps``; of what is transformed already, only public attributes."""

    def decorate(wrapper: Any) -> Any:
        functools.update_wrapper(wrapper, function, updated=())
        is_ours = isinstance(function, Rebuilt)
        if is_ours or inspect.isfunction(function):
            for name, value in vars(function).items():
                is_inner = is_ours and name.startswith("_")
                if not is_inner and name not in vars(wrapper):
                    setattr(wrapper, name, value)
        return wrapper

    return decorate
