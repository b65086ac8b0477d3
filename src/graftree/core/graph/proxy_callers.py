"""Accesses that are recorded now, for an object that comes later."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

A = TypeVar("A", covariant=True)


@dataclasses.dataclass(frozen=True)
class GetItem:
    """Takes the item of a key."""

    key: Any

    def __call__(self, x: Any) -> Any:
        return x[self.key]


@dataclasses.dataclass(frozen=True)
class GetAttr:
    """Takes the attribute of a name."""

    name: str

    def __call__(self, x: Any) -> Any:
        return getattr(x, self.name)


@dataclasses.dataclass(frozen=True)
class DelayedAccessor:
    """A chain of accesses; its attributes and items are longer chains.

    Attributes:
        actions: The accesses, the first one first.

    Example:
        >>> bias = nnx.proxy_caller.DelayedAccessor().layers[0].bias
        >>> model = nnx.Dict(layers=nnx.List([nnx.Dict(bias=1.0)]))
        >>> bias(model)
        1.0
    """

    actions: tuple[GetItem | GetAttr, ...] = ()

    def __call__(self, x: Any) -> Any:
        for action in self.actions:
            x = action(x)
        return x

    def __getattr__(self, name: str) -> DelayedAccessor:
        return DelayedAccessor((*self.actions, GetAttr(name)))

    def __getitem__(self, key: Any) -> DelayedAccessor:
        return DelayedAccessor((*self.actions, GetItem(key)))


class ApplyCaller(Protocol[A]):
    """What `nnx.call` returns: reaches a method, and gives its output and the state."""

    def __getattr__(self, name: str, /) -> ApplyCaller[A]: ...
    def __getitem__(self, key: Any, /) -> ApplyCaller[A]: ...
    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, A]: ...


class CallableProxy:
    """A function of an accessor, called like the method that the accessor reaches.

    Args:
        callable: Called with the accessor, then the arguments.
        accessor: The accesses so far.

    Example:
        >>> def call(accessor, *args):
        ...     return accessor("abc")(*args)
        >>> nnx.proxy_caller.CallableProxy(call).upper()
        'ABC'
    """

    def __init__(
        self, callable: Callable[..., Any], accessor: DelayedAccessor | None = None
    ):
        self._callable = callable
        self._accessor = DelayedAccessor() if accessor is None else accessor

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._callable(self._accessor, *args, **kwargs)

    def __getattr__(self, name: str) -> CallableProxy:
        return CallableProxy(self._callable, getattr(self._accessor, name))

    def __getitem__(self, key: Any) -> CallableProxy:
        return CallableProxy(self._callable, self._accessor[key])
