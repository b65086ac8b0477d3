"""The classes that are pytrees of ours, for those who must know of each one."""

from __future__ import annotations

from collections.abc import Callable

_classes: list[type] = []
_observers: list[Callable[[type], None]] = []


def announce(cls: type) -> None:
    """Tells that a class was registered as a pytree."""
    _classes.append(cls)
    for observer in _observers:
        observer(cls)


def observe(observer: Callable[[type], None]) -> None:
    """Calls a function with each class that was announced, or will be."""
    if observer not in _observers:
        _observers.append(observer)
    for cls in [*_classes]:
        observer(cls)


def ignore(observer: Callable[[type], None]) -> None:
    """Undoes `observe`."""
    if observer in _observers:
        _observers.remove(observer)
