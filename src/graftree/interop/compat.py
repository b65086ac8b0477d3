"""The functions and transforms with graph mode switched on, whatever the mode in force.

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

_GRAPH = (
    "split state clone graphdef flatten iter_graph iter_modules iter_children "
    "recursive_map view view_info reseed get_abstract_model"
).split()
_UPDATES = (
    "split_rngs fork_rngs jit cached_partial grad pmap vmap shard_map value_and_grad "
    "custom_vjp scan while_loop fori_loop cond switch remat checkify eval_shape"
).split()
# These two never work with graph updates: they only name the argument to pass instead.
_REFUSING = ["vjp", "jvp"]


def _with_defaults(*names: str, **defaults: bool) -> None:
    for name in names:
        globals()[name] = functools.partial(getattr(_nnx, name), **defaults)


_with_defaults(*_GRAPH, graph=True)
_with_defaults(*_UPDATES, *_REFUSING, graph=True, graph_updates=True)
backup_keys = functools.partial(model_streams.backup_keys, graph=True)
nodes.IN_COMPAT.update([*_GRAPH, *_UPDATES, "backup_keys"])
