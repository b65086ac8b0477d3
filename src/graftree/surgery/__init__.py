"""Models changed in place: the public sub-module `nnx.surgery`.

The public names are in the table below, and nothing is imported before one is used.
"""

from __future__ import annotations

import typing

from graftree import lazy_names

# For each file its public names. Type checkers read imports, below the table.
PUBLIC: dict[str, str] = {}

if typing.TYPE_CHECKING:
    pass


__getattr__, __dir__ = lazy_names.functions_of(__name__, PUBLIC)
