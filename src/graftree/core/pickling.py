"""How objects are pickled: as a global name, or as the call that made them.

Functions are pickled by name. Two kinds of objects in their place would not be: those
that JAX wraps, such as ``jax.nn.relu``, and those that `transforms` returns, which hold
what JAX compiled, and weak references.
"""

from __future__ import annotations

import copyreg
import importlib
from typing import Any, Self


class Rebuilt:
    """An object that is pickled as the call that made it, without what it learned.

    One that is a global of its module is pickled by its name, as a function is. Copying
    it returns the object itself, as for a function.
    """

    _call: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        made._call = args, kwargs
        return made

    def kept(self) -> dict[str, Any]:
        """Attributes that are kept besides."""
        return {}

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> Any:
        name = _global_name(self)
        if name is not None:
            return name
        # In two steps: what it is made of may refer to it.
        new = copyreg.__newobj__  # pyright: ignore[reportAttributeAccessIssue]
        return new, (type(self),), (self._call, self.kept())

    def __setstate__(self, state: Any) -> None:
        (args, kwargs), kept = state
        vars(self).update(vars(type(self)(*args, **kwargs)), **kept)


class _ByName:
    """Stands in a pickle for a function; it is loaded as that function."""

    def __init__(self, function: Any) -> None:
        self._place = (function.__module__, function.__qualname__)

    def __reduce__(self) -> Any:
        return _find, self._place


def by_name(value: Any) -> Any:
    """Stands for a wrapped function that its module has under its name."""
    if not hasattr(value, "__wrapped__") or _global_name(value) is None:
        return value
    return _ByName(value)


def _global_name(value: Any) -> str | None:
    """The name under which the module of a value has it; there may be none."""
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None)
    # The main program of the process that loads is another one.
    if module is None or name is None or module in ("__main__", "__mp_main__"):
        return None
    try:
        return name if _find(module, name) is value else None
    except (ImportError, AttributeError):
        return None


def _find(module: str, name: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found
