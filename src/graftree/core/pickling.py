"""Pickling of objects, and copying by the same methods; the classes that there are.

Functions are pickled by name. Two kinds of objects in their place would not be: those
that JAX wraps, such as ``jax.nn.relu``, and those that `transforms` returns, which hold
compiled programs and weak references.

A class may define how its objects are pickled and copied (``__reduce__``,
``__getstate__``, ...). `copied` asks it, as the module `copy` does where a class has no
``__copy__``.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import functools
import importlib
import types
from collections.abc import Callable, Sequence
from typing import Any, Self


class Rebuilt:
    """An object that is pickled as the call that made it, without its later knowledge.

    A global of its module is pickled by its name, as a function is. Copying
    it returns the object itself, as for a function.
    """

    _call: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        obj = super().__new__(cls)
        obj._call = args, kwargs
        return obj

    def kept(self) -> dict[str, Any]:
        """Further attributes that are kept."""
        return {}

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> Any:
        name = _global_name(self)
        if name is not None:
            return name
        # In two steps: its parts may refer to it.
        new = copyreg.__newobj__  # pyright: ignore[reportAttributeAccessIssue]
        return new, (type(self),), (self._call, self.kept())

    def __setstate__(self, state: Any) -> None:
        (args, kwargs), attributes = state
        vars(self).update(vars(type(self)(*args, **kwargs)), **attributes)


class _ByName:
    """Stands in a pickle for a function; it is loaded as that function."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __reduce__(self) -> Any:
        return _find, (self.function.__module__, self.function.__qualname__)


def by_name(value: Any) -> Any:
    """Returns a stand-in for a wrapped function that its module has under its name."""
    if not hasattr(value, "__wrapped__") or _global_name(value) is None:
        return value
    return _ByName(value)


def with_names(reduced: Any) -> Any:
    """Writes functions by name in the attributes that ``__reduce_ex__`` returns."""
    return _with_attributes(reduced, _names_in)


def _with_attributes(reduced: Any, changes: Callable[[Any], dict[str, Any]]) -> Any:
    if isinstance(reduced, str) or len(reduced) < 3:
        return reduced
    make, args, state, *rest = reduced
    if type(state) is dict:
        state = {**state, **changes(state)}
    elif type(state) is tuple and len(state) == 2 and type(state[0]) is dict:
        state = {**state[0], **changes(state[0])}, state[1]
    return make, args, state, *rest


def _names_in(attributes: dict[str, Any]) -> dict[str, Any]:
    return {
        name: by_name(value)
        for name, value in attributes.items()
        # Where `functools.wraps` keeps it; Variables and numbers have none.
        if type(value).__dictoffset__ and hasattr(value, "__wrapped__")
    }


def _functions_in(attributes: dict[str, Any]) -> dict[str, Any]:
    return {k: v.function for k, v in attributes.items() if type(v) is _ByName}


def copied(x: Any, memo: dict[int, Any] | None = None) -> Any:
    """Copies an object as it would be pickled and loaded.

    Args:
        x: The object.
        memo: The memo of ``copy.deepcopy``; ``None`` for a shallow copy.
    """
    reduced = x.__reduce_ex__(4)
    if isinstance(reduced, str):
        return x
    reduced = _with_attributes(reduced, _functions_in)
    parts: list[Any] = [*reduced, *[None] * (6 - len(reduced))]
    make, args, state, items, pairs, setter = parts

    def copy_of(piece: Any) -> Any:
        return piece if memo is None else copy.deepcopy(piece, memo)

    new = make(*map(copy_of, args))
    if memo is not None:
        memo[id(x)] = new
    if state is not None:
        set_state(new, copy_of(state), setter)
    for item in items or ():
        new.append(copy_of(item))
    for key, value in pairs or ():
        new[copy_of(key)] = copy_of(value)
    return new


def set_state(x: Any, state: Any, setter: Any = None) -> None:
    """Gives an object the state that its ``__getstate__`` returned."""
    if setter is not None:
        setter(x, state)
    elif hasattr(x, "__setstate__"):
        x.__setstate__(state)
    else:
        set_attributes(x, state)


def set_attributes(x: Any, state: Any) -> None:
    """Gives an object the attributes in the state of an object without methods."""
    entries, slots = state if isinstance(state, tuple) else (state, None)
    vars(x).update(entries or {})
    for name, value in (slots or {}).items():
        object.__setattr__(x, name, value)


def slots_of(x: Any, besides: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the attributes of an object that are in slots, besides some of them."""
    attributes: dict[str, Any] = {}
    for name, read in _readers_of_slots(type(x)):
        if name not in besides:
            with contextlib.suppress(AttributeError):  # it may be unset
                attributes[name] = read(x)
    return attributes


@functools.cache
def _readers_of_slots(cls: type) -> list[tuple[str, Callable[[Any], Any]]]:
    # By their descriptors, whose names are those that Python gave them.
    return [
        (name, member.__get__)
        for base in reversed(cls.__mro__)
        if vars(base).get("__slots__")
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType)
    ]


def _global_name(value: Any) -> str | None:
    """Returns the name of a value in its module; there may be none."""
    # The main program of the process that loads is another one.
    if getattr(value, "__module__", None) in ("__main__", "__mp_main__"):
        return None
    return value.__qualname__ if is_global(value) else None


def is_global(value: Any) -> bool:
    """Whether the module of a value has it under its name."""
    module: Any = getattr(value, "__module__", None)
    name: Any = getattr(value, "__qualname__", None)
    try:
        return bool(module and name) and _find(module, name) is value
    except (ImportError, AttributeError):
        return False


def _find(module: str, name: str) -> Any:
    value: Any = importlib.import_module(module)
    for attribute in name.split("."):
        value = getattr(value, attribute)
    return value
