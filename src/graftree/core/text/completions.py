"""What ``dir`` lists, and so what a notebook or shell offers on Tab.

It lists everything that users can call, read or set: public names, the private names of
their own classes and objects, and the names of the language. It leaves out the private
names of this library and of the standard library, and attributes that are no
identifiers, such as the numbers under which a List keeps its items.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import jax

from graftree import _jax

_INTERNAL = ("_pytree__", "_object__", "_abc_")
_NOT_THE_USERS = frozenset({"graftree", "abc", "typing", "collections"})


# These three are ``__dir__`` methods.


def of_class(self: type) -> list[str]:
    """The names of a class that are for users."""
    return _listed(type.__dir__(self), self, own=())


def of_object(self: Any, further: Iterable[str] = ()) -> list[str]:
    """The names of an object that are for users, with further ones."""
    own = getattr(self, "__dict__", ())
    return _listed({*object.__dir__(self), *further}, type(self), own)


def of_variable(self: Any) -> list[str]:
    """The names of a Variable for users, with those of its metadata and its value."""
    raw = self.get_raw_value()
    # A ref and a tracer show those of the array that they stand for.
    is_array = isinstance(raw, jax.Array) or _jax.is_ref(raw)
    of_value = [name for name in dir(jax.Array if is_array else raw) if name[:1] != "_"]
    return of_object(self, [*self.get_metadata(), *of_value])


def _listed(names: Iterable[str], cls: type, own: Collection[str]) -> list[str]:
    return sorted(
        name
        for name in names
        if name.isidentifier() and not _is_internal(name, cls, own)
    )


def _is_internal(name: str, cls: type, own: Collection[str]) -> bool:
    if not name.startswith("_") or name.startswith("__"):
        return False
    if name.startswith(_INTERNAL):
        return True
    if name in own:
        return False
    owner = next((base for base in cls.__mro__ if name in vars(base)), type)
    return owner.__module__.partition(".")[0] in _NOT_THE_USERS
