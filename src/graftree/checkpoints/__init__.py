"""Objects on disk: the public sub-module `nnx.checkpoints`.

- ``loading.py``: filling an object with a state from elsewhere, strictly.

The public names are in the table below, and nothing is imported before one is used.
"""

from __future__ import annotations

import typing

from graftree import lazy_names

# For each file its public names. Type checkers read imports, below the table.
PUBLIC: dict[str, str] = {
    "loading": "Loaded load_state",
}

if typing.TYPE_CHECKING:
    from graftree.checkpoints.loading import Loaded as Loaded
    from graftree.checkpoints.loading import load_state as load_state


__getattr__, __dir__ = lazy_names.functions_of(__name__, PUBLIC)
