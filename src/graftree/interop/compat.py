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

_graph = {"graph": True}
_updates = {"graph": True, "graph_updates": True}

split = functools.partial(_nnx.split, **_graph)
state = functools.partial(_nnx.state, **_graph)
clone = functools.partial(_nnx.clone, **_graph)
graphdef = functools.partial(_nnx.graphdef, **_graph)
flatten = functools.partial(_nnx.flatten, **_graph)
iter_graph = functools.partial(_nnx.iter_graph, **_graph)
iter_modules = functools.partial(_nnx.iter_modules, **_graph)
iter_children = functools.partial(_nnx.iter_children, **_graph)
recursive_map = functools.partial(_nnx.recursive_map, **_graph)
view = functools.partial(_nnx.view, **_graph)
view_info = functools.partial(_nnx.view_info, **_graph)
reseed = functools.partial(_nnx.reseed, **_graph)
backup_keys = functools.partial(model_streams.backup_keys, **_graph)
get_abstract_model = functools.partial(_nnx.get_abstract_model, **_graph)

split_rngs = functools.partial(_nnx.split_rngs, **_updates)
fork_rngs = functools.partial(_nnx.fork_rngs, **_updates)
jit = functools.partial(_nnx.jit, **_updates)
cached_partial = functools.partial(_nnx.cached_partial, **_updates)
grad = functools.partial(_nnx.grad, **_updates)
pmap = functools.partial(_nnx.pmap, **_updates)
vmap = functools.partial(_nnx.vmap, **_updates)
shard_map = functools.partial(_nnx.shard_map, **_updates)
value_and_grad = functools.partial(_nnx.value_and_grad, **_updates)
# These two only name the argument to pass instead.
vjp = functools.partial(_nnx.vjp, **_updates)
jvp = functools.partial(_nnx.jvp, **_updates)
custom_vjp = functools.partial(_nnx.custom_vjp, **_updates)
scan = functools.partial(_nnx.scan, **_updates)
while_loop = functools.partial(_nnx.while_loop, **_updates)
fori_loop = functools.partial(_nnx.fori_loop, **_updates)
cond = functools.partial(_nnx.cond, **_updates)
switch = functools.partial(_nnx.switch, **_updates)
remat = functools.partial(_nnx.remat, **_updates)
checkify = functools.partial(_nnx.checkify, **_updates)
eval_shape = functools.partial(_nnx.eval_shape, **_updates)

nodes.IN_COMPAT.update(
    name
    for name, function in [*globals().items()]
    # These two never work with graph updates.
    if isinstance(function, functools.partial) and name not in ("vjp", "jvp")
)
