"""What attributes are by default: the defaults of the parameters of a constructor."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

_ATOMS = (bool, int, float, complex, str, bytes, type(None))
# Of each class its constructor, as it was when asked, and the defaults.
_known: weakref.WeakKeyDictionary[type, tuple[Any, dict[str, Any]]] = (
    weakref.WeakKeyDictionary()
)


def defaults_of(cls: type) -> dict[str, Any]:
    """The defaults of the constructors of a class and its bases, by parameter.

    A parameter is that of the first class which has it, if it has no default there, it
    is not listed.
    """
    constructor = cls.__init__
    known = _known.get(cls)
    if known is None or known[0] is not constructor:
        _known[cls] = known = constructor, _find_defaults(cls)
    return known[1]


def _find_defaults(cls: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base) or base is object:
            continue
        try:
            parameters = inspect.signature(base.__init__).parameters
        except (TypeError, ValueError):  # not written in Python
            continue
        for name, parameter in parameters.items():
            found.setdefault(name, parameter.default)
    empty = inspect.Parameter.empty
    return {name: value for name, value in found.items() if value is not empty}


def is_default(value: Any, defaults: Mapping[str, Any], name: str) -> bool:
    """Whether an attribute has the default of the parameter of its name."""
    if name not in defaults:
        return False
    default = defaults[name]
    # A constructor that takes one axis or several keeps a tuple.
    is_one_axis = type(default) is int and _equal(value, (default,))
    return is_one_axis or _equal(value, default)


def _equal(a: Any, b: Any) -> bool:
    """Whether two values are the same; of foreign classes no ``==`` is asked."""
    if a is b:
        return True
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return len(a) == len(b) and all(k in b and _equal(a[k], b[k]) for k in a)
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    return isinstance(a, (*_ATOMS, np.dtype)) and a == b
