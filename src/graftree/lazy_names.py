"""Names of a package that are imported when they are first used.

A package like `graftree.debugging` lists its public names by file in a table, so that
``import graftree`` loads none of them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def functions_of(
    package: str, table: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: Its full name.
        table: For each file of it the public names there, separated by spaces.
    """
    files = {name: file for file, names in table.items() for name in names.split()}

    def look_up(name: str) -> Any:
        if name not in files:
            # With its name and the module Python adds what it may be a misspelling of.
            raise AttributeError(
                f"Module {package} has no attribute {name!r}.",
                name=name,
                obj=sys.modules[package],
            )
        value = getattr(importlib.import_module(f"{package}.{files[name]}"), name)
        setattr(sys.modules[package], name, value)  # the next access is a plain one
        return value

    return look_up, lambda: sorted(files)
