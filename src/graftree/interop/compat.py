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
from graftree.transforms import (
    autodiff,
    branching,
    checking,
    jacobian_products,
    loops,
    mapping,
    partials,
    shape_eval,
)
from graftree.transforms import custom_vjp as custom_vjp_module
from graftree.transforms import jit as jit_module
from graftree.transforms import remat as remat_module
from graftree.transforms import scan as scan_module
from graftree.transforms import shard_map as shard_map_module

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
get_abstract_model = functools.partial(shape_eval.get_abstract_model, **_graph)

split_rngs = functools.partial(rng_splitting.split_rngs, **_updates)
fork_rngs = functools.partial(rng_splitting.fork_rngs, **_updates)
jit = functools.partial(jit_module.jit, **_updates)
cached_partial = functools.partial(partials.cached_partial, **_updates)
grad = functools.partial(autodiff.grad, **_updates)
pmap = functools.partial(mapping.pmap, **_updates)
vmap = functools.partial(mapping.vmap, **_updates)
shard_map = functools.partial(shard_map_module.shard_map, **_updates)
value_and_grad = functools.partial(autodiff.value_and_grad, **_updates)
# These two only say what to pass instead.
vjp = functools.partial(jacobian_products.vjp, **_updates)
jvp = functools.partial(jacobian_products.jvp, **_updates)
custom_vjp = functools.partial(custom_vjp_module.custom_vjp, **_updates)
scan = functools.partial(scan_module.scan, **_updates)
while_loop = functools.partial(loops.while_loop, **_updates)
fori_loop = functools.partial(loops.fori_loop, **_updates)
cond = functools.partial(branching.cond, **_updates)
switch = functools.partial(branching.switch, **_updates)
remat = functools.partial(remat_module.remat, **_updates)
checkify = functools.partial(checking.checkify, **_updates)
eval_shape = functools.partial(shape_eval.eval_shape, **_updates)
