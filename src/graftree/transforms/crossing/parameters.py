"""What the arguments of a call are called in the function: by its parameters.

JAX speaks of a program so: ``net``, ``args[0]`` of ``*args``, ``options['k']`` of
``**options``. What is known of a function here doesn't keep it alive.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, NamedTuple


def named(
    function: Callable[..., Any],
) -> Callable[[Any, Any], list[tuple[str, Any]]]:
    """Gives each of ``args, kwargs`` with what it is called in the function."""

    def names(args: Any, kwargs: Any) -> list[tuple[str, Any]]:
        known = read(source_of(function))
        by_position = [(known.at(i), x) for i, x in enumerate(args)]
        return by_position + [(known.called(key), x) for key, x in kwargs.items()]

    return names


class Parameters(NamedTuple):
    """The names of the parameters of a function.

    Attributes:
        positional: Of those that may be passed by position.
        named: Of all that may be passed by name.
        rest: That of ``*args``.
        others: That of ``**kwargs``.
    """

    positional: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    rest: str | None = None
    others: str | None = None

    def at(self, position: int) -> str:
        """The name of a positional argument."""
        count = len(self.positional)
        if position < count:
            return self.positional[position]
        if self.rest is None:
            return f"args[{position}]"
        return f"{self.rest}[{position - count}]"

    def called(self, keyword: str) -> str:
        """The name of a keyword argument."""
        if keyword in self.named:
            return keyword
        return f"{self.others or 'kwargs'}[{keyword!r}]"


UNKNOWN = Parameters()

# What names can be read from; the code of a function costs nothing to ask for.
Source = CodeType | Parameters


def source_of(function: Callable[..., Any]) -> Source:
    """What the names of the parameters of a function can be read from.

    It is equal for functions whose parameters have the same names and kinds.
    """
    if type(function) is FunctionType and not vars(function):
        return function.__code__
    try:
        known = _known.get(function)
        if known is None:
            known = _known[function] = _of_signature(function)
    except TypeError:  # no hash, or no weak references
        known = _of_signature(function)
    return known


_known: weakref.WeakKeyDictionary[Callable[..., Any], Parameters]
_known = weakref.WeakKeyDictionary()


def read(source: Source) -> Parameters:
    """The names that a source tells."""
    return _of_code(source) if isinstance(source, CodeType) else source


def _of_code(code: CodeType) -> Parameters:
    names = code.co_varnames
    start, stop = code.co_posonlyargcount, code.co_argcount
    end = stop + code.co_kwonlyargcount
    variadic = iter(names[end:])
    rest = next(variadic) if code.co_flags & inspect.CO_VARARGS else None
    others = next(variadic) if code.co_flags & inspect.CO_VARKEYWORDS else None
    return Parameters(names[:stop], names[start:end], rest, others)


def _of_signature(function: Callable[..., Any]) -> Parameters:
    try:
        given = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return UNKNOWN

    def names(*kinds: Any) -> tuple[str, ...]:
        return tuple([p.name for p in given if p.kind in kinds])

    kind = inspect.Parameter
    return Parameters(
        names(kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD),
        names(kind.POSITIONAL_OR_KEYWORD, kind.KEYWORD_ONLY),
        next(iter(names(kind.VAR_POSITIONAL)), None),
        next(iter(names(kind.VAR_KEYWORD)), None),
    )
