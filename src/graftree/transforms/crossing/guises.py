"""Functions that JAX traces, in the guise of the user's.

JAX traces functions of groups of leaves. What it says of them, in errors, logs and
programs, is meant for the user: it must show the user's function with its file and
line, and arguments by the names that they have there. JAX asks a function for

    __name__        what it is called
    __wrapped__     where it is written: the code at the end of these
    __signature__   what its arguments are called; the path of a leaf follows

So the name of each argument is empty here, and the path of a leaf in a group, which
`packing.Values` tells, is all of its name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, MappingProxyType, SimpleNamespace
from typing import Any

from graftree.transforms.crossing import parameters


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
        function: That of the user, which ``inner`` is not made to keep alive.
        inner: What JAX traces, a function of groups of leaves.
        leading: The names of arguments in front of the groups.
        name: What it is called; as ``function`` by default.
        has_own_names: Whether the groups are those of a call of another function, which
            may have other names for the arguments.
    """
    inner.__name__ = inner.__qualname__ = name or name_of(function)
    inner.__wrapped__ = _written(function)
    source = parameters.source_of(function) if has_own_names else None
    inner.__signature__ = _signature(tuple(leading), source)
    return inner


def name_of(function: Any) -> str:
    """The name of a function, or of what is called like one."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _written(function: Any) -> _Written:
    """What the user wrote, below all decorators."""
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
        # Of what has no code JAX takes the name from this.
        return f"<built-in function {self.__name__}>"


class _Nameless(str):
    """A name that is not shown; no two are equal."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


class _Bound:
    """Arguments of a call, as those of an ``inspect.BoundArguments``."""

    def __init__(self, names: Sequence[str], args: tuple[Any, ...]) -> None:
        unnamed = [_Nameless() for _ in args[len(names) :]]
        self.args = args
        self.kwargs: dict[str, Any] = {}
        self.arguments = dict(zip([*names, *unnamed], args, strict=True))
        parameters = dict.fromkeys(self.arguments, _GROUPS)
        self.signature = SimpleNamespace(parameters=parameters)

    def apply_defaults(self) -> None:
        """There are none."""


class _Signature(inspect.Signature):
    """The signature of a function of groups, which have no names."""

    def __init__(
        self, leading: tuple[str, ...], source: parameters.Source | None
    ) -> None:
        super().__init__([_GROUPS])
        self._leading, self._source = leading, source

    def __reduce__(self) -> Any:
        source = self._source
        return _Signature, (self._leading, source and parameters.read(source))

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """All of them as one, which has no name either."""
        return MappingProxyType({_Nameless(): _GROUPS})

    def bind(self, /, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            raise TypeError(f"got an unexpected keyword argument: {[*kwargs]}")
        if self._source is not None:
            args = tuple([x.called_as(self._source) for x in args])
        return _Bound(self._leading, args)


_GROUPS = inspect.Parameter("groups", inspect.Parameter.VAR_POSITIONAL)
_signature = functools.lru_cache(_Signature)
