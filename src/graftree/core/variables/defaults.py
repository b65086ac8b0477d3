"""The defaults of new Variables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, overload

from graftree import config


class use_hijax(config.ScopedDefault):
    """Sets the default of ``Variable(..., hijax=)``; `var_defaults` of older releases.

    Example:
        >>> with nnx.use_hijax(True):
        ...     nnx.Variable(jnp.ones(2)).hijax
        True
    """

    flag = "flax_hijax_variable"


class use_refs(config.ScopedDefault):
    """Sets the default of ``Variable(..., ref=)``; `var_defaults` of older releases.

    Example:
        >>> with nnx.use_refs(True):
        ...     nnx.Variable(jnp.ones(2)).ref
        True
    """

    flag = "flax_array_ref"


_SCOPES: dict[str, type[config.ScopedDefault]] = {"hijax": use_hijax, "ref": use_refs}


def using_hijax() -> bool:
    """Whether new Variables are made with ``hijax=True`` in this thread."""
    return use_hijax.current_value()


def using_refs() -> bool:
    """Whether new Variables are made with ``ref=True`` in this thread."""
    return use_refs.current_value()


def current(name: str) -> bool:
    """The default of ``hijax`` or ``ref`` now in force in this thread."""
    return _SCOPES[name].current_value()


@dataclasses.dataclass(frozen=True)
class VarDefaults(Mapping[str, bool]):
    """The defaults in force: a mapping with the keys ``hijax`` and ``ref``.

    Example:
        >>> dict(nnx.var_defaults())
        {'hijax': False, 'ref': False}
    """

    hijax: bool
    ref: bool

    def __getitem__(self, key: str) -> bool:
        if key not in _SCOPES:
            raise KeyError(key)
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(_SCOPES)

    def __len__(self) -> int:
        return len(_SCOPES)


class VarDefaultsContext:
    """Sets defaults of new Variables; made by `var_defaults`."""

    def __init__(self, values: Mapping[str, bool]) -> None:
        self._values = dict(values)
        self._scopes = [_SCOPES[name](value) for name, value in values.items()]

    def __enter__(self) -> None:
        for scope in self._scopes:
            scope.__enter__()

    def __exit__(self, *exception: object) -> None:
        for scope in reversed(self._scopes):
            scope.__exit__(*exception)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorates a function to run under the defaults; the ambient ones are kept."""
        for scope in self._scopes:
            function = scope(function)
        return function


@overload
def var_defaults() -> VarDefaults: ...
@overload
def var_defaults(*, hijax: bool = ..., ref: bool = ...) -> VarDefaultsContext: ...
def var_defaults(
    *, hijax: bool | None = None, ref: bool | None = None
) -> VarDefaults | VarDefaultsContext:
    """Returns the defaults of new Variables; with arguments, sets them.

    Setting them takes effect immediately, for this thread. The result is a context
    manager and a decorator that restores the previous defaults.

    Args:
        hijax: The default of ``Variable(..., hijax=)``; ``None`` leaves it.
        ref: The default of ``Variable(..., ref=)``; ``None`` leaves it.

    Returns:
        Without arguments a `VarDefaults`, otherwise a context.

    Example:
        >>> with nnx.var_defaults(ref=True):
        ...     count = nnx.Variable(jnp.array(0))
        >>> count.ref, nnx.var_defaults().ref
        (True, False)
    """
    given = {"hijax": hijax, "ref": ref}
    values = {name: value for name, value in given.items() if value is not None}
    if not values:
        return VarDefaults(**{name: current(name) for name in _SCOPES})
    return VarDefaultsContext(values)
