"""Public names of a module, which `dir` lists; packages imported on first use.

A chapter like `graftree.precision` imports its public names, and is imported at its
first use. Otherwise its namespace has only its files.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any


def public_names(module: types.ModuleType) -> list[str]:
    """Lists the names that a module defines or passes on, without modules."""
    return sorted(
        name
        for name, value in vars(module).items()
        if not (name.startswith("_") or isinstance(value, types.ModuleType))
        if name != "annotations"  # of `__future__`
    )


def lister(module: str) -> Callable[[], list[str]]:
    """Makes the ``__dir__`` of a module of this name: it lists its public names."""
    return lambda: public_names(sys.modules[module])


class OnUse(types.ModuleType):
    """A package that is imported when something of it is first asked for.

    It replaces an import that only type checkers see, so that annotations can be
    evaluated: ``typing.get_type_hints`` looks for their names in the module.

    Args:
        name: The name of the package.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)
