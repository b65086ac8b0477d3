"""The functions and transforms with graph mode switched on, whatever the mode in force.

Programs written before tree mode existed use them. Each is the function of the same
name with other defaults; keywords of the caller win.
"""

from __future__ import annotations

import functools

from graftree.core.graph import functional, traversals, tree_checks
from graftree.core.modules import modules
from graftree.core.rng import model_streams
from graftree.sharding import creation
from graftree.transforms import maps, recordings
from graftree.transforms.compiled import jit as jit_module
from graftree.transforms.compiled import partials
from graftree.transforms.control_flow import cond_switch, loops
from graftree.transforms.control_flow import scan as scan_module
from graftree.transforms.derivatives import custom_vjp as custom_vjp_module
from graftree.transforms.derivatives import grad as grad_module
from graftree.transforms.derivatives import vjp_jvp

_graph = {"graph": True}
_updates = {"graph": True, "graph_updates": True}

split = functools.partial(functional.split, **_graph)
state = functools.partial(functional.state, **_graph)
clone = functools.partial(functional.clone, **_graph)
graphdef = functools.partial(functional.graphdef, **_graph)
flatten = functools.partial(functional.flatten, **_graph)
iter_graph = functools.partial(traversals.iter_graph, **_graph)
iter_modules = functools.partial(modules.iter_modules, **_graph)
iter_children = functools.partial(traversals.iter_children, **_graph)
recursive_map = functools.partial(traversals.recursive_map, **_graph)
view = functools.partial(modules.view, **_graph)
view_info = functools.partial(modules.view_info, **_graph)
reseed = functools.partial(model_streams.reseed, **_graph)
backup_keys = functools.partial(model_streams.backup_keys, **_graph)
get_abstract_model = functools.partial(creation.get_abstract_model, **_graph)

split_rngs = functools.partial(model_streams.split_rngs, **_updates)
fork_rngs = functools.partial(model_streams.fork_rngs, **_updates)
jit = functools.partial(jit_module.jit, **_updates)
cached_partial = functools.partial(partials.cached_partial, **_updates)
grad = functools.partial(grad_module.grad, **_updates)
pmap = functools.partial(maps.pmap, **_updates)
vmap = functools.partial(maps.vmap, **_updates)
shard_map = functools.partial(maps.shard_map, **_updates)
value_and_grad = functools.partial(grad_module.value_and_grad, **_updates)
# These two only say what to pass instead.
vjp = functools.partial(vjp_jvp.vjp, **_updates)
jvp = functools.partial(vjp_jvp.jvp, **_updates)
custom_vjp = functools.partial(custom_vjp_module.custom_vjp, **_updates)
scan = functools.partial(scan_module.scan, **_updates)
while_loop = functools.partial(loops.while_loop, **_updates)
fori_loop = functools.partial(loops.fori_loop, **_updates)
cond = functools.partial(cond_switch.cond, **_updates)
switch = functools.partial(cond_switch.switch, **_updates)
remat = functools.partial(grad_module.remat, **_updates)
checkify = functools.partial(recordings.checkify, **_updates)
eval_shape = functools.partial(recordings.eval_shape, **_updates)

tree_checks.register_compat(
    name
    for name, function in [*globals().items()]
    # These two never work with graph updates.
    if isinstance(function, functools.partial) and name not in ("vjp", "jvp")
)
