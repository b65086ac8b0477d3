"""Makes JAX's messages about a traced function name the user's function.

JAX traces functions of groups of leaves. Its errors, logs and programs are meant for
the user: they must show the user's function with its file and line, and arguments by
the names that they have there. JAX reads these attributes of a function:

    __name__        its name
    __wrapped__     where it is written: the code at the end of these
    __signature__   the names of its arguments; the path of a leaf follows

So the name of each argument is empty here, and the path of a leaf in a group, which
`leaves.Leaves` gives, is its whole name. It begins with a parameter of the function:
``net``, ``args[0]`` of ``*args``, ``options['k']`` of ``**options``.

The data kept here about a function doesn't keep it alive.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FunctionType, MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

from graftree import config


def named_after(
    function: Callable[..., Any],
    inner: Any,
    leading: Sequence[str] = (),
    *,
    name: str | None = None,
    has_own_names: bool = False,
) -> Any:
    """Gives a function that JAX traces the guise of the user's function.

    Args:
        function: The user's, which ``inner`` is not made to keep alive.
        inner: The function that JAX traces, of groups of leaves.
        leading: The names of arguments in front of the groups.
        name: Its name; that of ``function`` by default.
        has_own_names: Whether the groups are those of a call of another function, which
            may have other names for the arguments.
    """
    inner.__name__ = inner.__qualname__ = name or name_of(function)
    inner.__wrapped__ = _written(function)
    parameters = parameters_of(function) if has_own_names else None
    inner.__signature__ = _signature(tuple(leading), parameters)
    return inner


def name_of(function: Any) -> str:
    """Finds the name of a function, or of another callable."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _written(function: Any) -> _Written:
    """Finds the function that the user wrote, below all decorators."""
    name = name_of(function)
    while not hasattr(function := inspect.unwrap(function), "__code__"):
        if isinstance(function, functools.partial):
            function = function.func
        elif inspect.isroutine(function) or isinstance(function, type | _Written):
            return _Written(name, None)
        else:  # an object that is called
            function = type(function).__call__
    return _Written(name, function.__code__)


class _Written:
    """Stands for a function where JAX asks for its code."""

    def __init__(self, name: str, code: CodeType | None) -> None:
        self.__name__ = name
        if code is not None:
            self.__code__ = code

    def __str__(self) -> str:
        # JAX takes the name from this if there is no code.
        return f"<built-in function {self.__name__}>"


class _Nameless(str):
    """A name that is not shown; no two are equal."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


class _GroupsSignature(inspect.Signature):
    """Signature of a function of groups, which have no names."""

    def __init__(self, leading: tuple[str, ...], names: Parameters | None) -> None:
        super().__init__([_GROUPS])
        self._leading, self._names = leading, names

    def __reduce__(self) -> Any:
        return _GroupsSignature, (self._leading, self._names)

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """All parameters as one, which has no name either."""
        return MappingProxyType({_Nameless(): _GROUPS})

    def bind(self, /, *args: Any, **kwargs: Any) -> Any:
        """Binds arguments, as for an ``inspect.BoundArguments``."""
        if kwargs:
            raise TypeError(f"got an unexpected keyword argument: {[*kwargs]}")
        if self._names is not None:
            args = tuple([x.called_as(self._names) for x in args])
        unnamed = [_Nameless() for _ in args[len(self._leading) :]]
        arguments = dict(zip([*self._leading, *unnamed], args, strict=True))
        parameters = dict.fromkeys(arguments, _GROUPS)
        return SimpleNamespace(
            args=args,
            kwargs={},
            arguments=arguments,
            signature=SimpleNamespace(parameters=parameters),
            apply_defaults=lambda: None,  # there are none
        )


_GROUPS = inspect.Parameter("groups", inspect.Parameter.VAR_POSITIONAL)
_signature = functools.lru_cache(_GroupsSignature)


def named(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[str, Any]]:
    """Each argument with its name in the function."""
    parameters = parameters_of(function)
    arguments = (*enumerate(args), *kwargs.items())
    return [(parameters.name_of(key), x) for key, x in arguments]


class Parameters(NamedTuple):
    """Names of the parameters of a function.

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

    def name_of(self, argument: int | str) -> str:
        """Finds the name of an argument, by its position or its keyword."""
        if isinstance(argument, str):
            if argument in self.named:
                return argument
            return f"{self.others or 'kwargs'}[{argument!r}]"
        count = len(self.positional)
        if argument < count:
            return self.positional[argument]
        if self.rest is None:
            return f"args[{argument}]"
        return f"{self.rest}[{argument - count}]"


def parameters_of(function: Callable[..., Any]) -> Parameters:
    """Finds the names of the parameters of a function."""
    if type(function) is not FunctionType or vars(function):
        parameters = _known_of(function) if config.caches.are_used else None
        return parameters or _of_signature(function)
    # Its code has them as well, and is read in a tenth of the time.
    code = function.__code__
    names = code.co_varnames
    start, stop = code.co_posonlyargcount, code.co_argcount
    end = stop + code.co_kwonlyargcount
    variadic = iter(names[end:])
    rest = next(variadic) if code.co_flags & inspect.CO_VARARGS else None
    others = next(variadic) if code.co_flags & inspect.CO_VARKEYWORDS else None
    return Parameters(names[:stop], names[start:end], rest, others)


def _known_of(function: Callable[..., Any]) -> Parameters | None:
    try:
        parameters = _known.get(function)
        if parameters is None:
            parameters = _known[function] = _of_signature(function)
        return parameters
    except TypeError:  # no hash, or no weak references
        return None


_known: weakref.WeakKeyDictionary[Callable[..., Any], Parameters]
_known = weakref.WeakKeyDictionary()
config.caches.add(_known)


def _of_signature(function: Callable[..., Any]) -> Parameters:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return Parameters()

    def names(*kinds: Any) -> tuple[str, ...]:
        return tuple([p.name for p in parameters if p.kind in kinds])

    kind = inspect.Parameter
    return Parameters(
        names(kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD),
        names(kind.POSITIONAL_OR_KEYWORD, kind.KEYWORD_ONLY),
        next(iter(names(kind.VAR_POSITIONAL)), None),
        next(iter(names(kind.VAR_KEYWORD)), None),
    )
