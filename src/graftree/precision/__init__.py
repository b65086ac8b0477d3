"""The dtypes of a whole model: the public sub-module `nnx.precision`.

- ``policies.py``: which dtypes parameters, arithmetic and results have; their text.
- ``models.py``: sets a policy in a model; ``layers.py``: what that is in one layer;
  ``applied.py``: what was set, ``tables.py`` prints it.

The public names are in the table below, and nothing is imported before one is used.
"""

from __future__ import annotations

import typing

from graftree import lazy_names

# For each file its public names. Type checkers read imports, below the table.
PUBLIC: dict[str, str] = {
    "models": "set_policy",
    "policies": "Policy",
}

if typing.TYPE_CHECKING:
    from graftree.precision.models import set_policy as set_policy
    from graftree.precision.policies import Policy as Policy


__getattr__, __dir__ = lazy_names.functions_of(__name__, PUBLIC)
