"""The functions and transforms with graph mode switched on, whatever the mode in force.

Programs written before there was a tree mode call them so. Each is the function of the
same name with other defaults; keywords of the caller win.
"""

from __future__ import annotations

import functools

from graftree.core import (
    cloning,
    functional,
    rng_keys,
    rng_splitting,
    traversals,
    views,
)
from graftree.transforms import autodiff, mapping
from graftree.transforms import jit as jit_module

_graph = {"graph": True}
_updates = {"graph": True, "graph_updates": True}

split = functools.partial(functional.split, **_graph)
state = functools.partial(functional.state, **_graph)
clone = functools.partial(cloning.clone, **_graph)
graphdef = functools.partial(functional.graphdef, **_graph)
flatten = functools.partial(functional.flatten, **_graph)
iter_graph = functools.partial(traversals.iter_graph, **_graph)
iter_modules = functools.partial(traversals.iter_modules, **_graph)
iter_children = functools.partial(traversals.iter_children, **_graph)
recursive_map = functools.partial(traversals.recursive_map, **_graph)
view = functools.partial(views.view, **_graph)
view_info = functools.partial(views.view_info, **_graph)
reseed = functools.partial(rng_keys.reseed, **_graph)
backup_keys = functools.partial(rng_keys.backup_keys, **_graph)

split_rngs = functools.partial(rng_splitting.split_rngs, **_updates)
fork_rngs = functools.partial(rng_splitting.fork_rngs, **_updates)
jit = functools.partial(jit_module.jit, **_updates)
grad = functools.partial(autodiff.grad, **_updates)
pmap = functools.partial(mapping.pmap, **_updates)
vmap = functools.partial(mapping.vmap, **_updates)
value_and_grad = functools.partial(autodiff.value_and_grad, **_updates)
