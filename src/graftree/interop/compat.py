"""Functions and transforms with graph mode switched on, whatever the mode in force.

Programs written before tree mode existed use them. Each is the function of the same
name with other defaults; keywords of the caller win.
"""

from __future__ import annotations

import functools
import sys

from graftree.core.graph import nodes
from graftree.core.rng import model_streams

# The public namespace has all of its names when it installs this module.
_nnx = sys.modules["graftree"]

# These two never work with graph updates: they only name the argument to pass instead.
_REFUSING = ["vjp", "jvp"]


def _with_defaults(*names: str, **defaults: bool) -> None:
    for name in names:
        function = getattr(_nnx, name, None) or getattr(model_streams, name)
        globals()[name] = functools.partial(function, **defaults)


_with_defaults(*nodes.WITH_GRAPH, graph=True)
_with_defaults(*nodes.WITH_UPDATES, *_REFUSING, graph=True, graph_updates=True)
