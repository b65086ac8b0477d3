"""Where the files of earlier versions went, so that pickles made with them load.

A pickle names classes and functions by their module. For each such module that is gone,
`MOVED` lists the modules that have its names now; `install` makes the old name
importable.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Mapping
from importlib import abc, machinery
from typing import Any

MOVED: Mapping[str, str] = {
    "core.attributes": "core.objects.attributes",
    "core.calling": "core.graph.functional",
    "core.capturing": "core.modules.capturing",
    "core.cloning": "core.graph.functional",
    "core.colors": "core.text.colors",
    "core.containers": "core.modules.containers",
    "core.flat_states": "core.states.flat_states",
    "core.flattening": "core.graph.flattening core.graph.merging",
    "core.functional": "core.graph.functional core.graph.updates core.graph.removals",
    "core.graph_states": "core.graph.graph_states",
    "core.mappings": "core.states.nested",
    "core.metadata": "core.variables.metadata core.imprints",
    "core.modules": "core.modules.modules",
    "core.nodes": "core.graph.nodes",
    "core.partitioning": "core.variables.partitioning",
    "core.pure_dicts": "core.states.pure_dicts",
    "core.pytrees": "core.objects.pytrees",
    "core.recorders": "core.modules.recorders",
    "core.refs": "core.modules.refs",
    "core.rng_keys": "core.rng.reseeding",
    "core.rng_splitting": "core.rng.splitting",
    "core.rngs": "core.rng.streams",
    "core.sharding": "core.variables.sharding",
    "core.skeletons": "core.graph.graphdefs",
    "core.states": "core.states.states",
    "core.text": "core.text.representations",
    "core.traversals": "core.graph.traversals core.modules.modules",
    "core.variable_defaults": "core.variables.defaults",
    "core.variable_names": "core.variables.kinds",
    "core.variables": "core.variables.variables core.variables.kinds",
    "core.views": "core.modules.views",
    "core.writing": "core.text.writing",
    "nn.arguments": "nn.support.arguments",
    "nn.bidirectional": "nn.recurrent",
    "nn.conv_transpose": "nn.conv",
    "nn.group_normalization": "nn.normalization",
    "nn.lstm_cells": "nn.cells",
    "nn.masks": "nn.attention",
    "nn.operations": "nn.support.computation",
    "nn.pooling_layers": "nn.pooling",
    "nn.promotion": "nn.support.computation",
    "nn.recurrent_cells": "nn.cells",
    "nn.single_state_cells": "nn.cells",
    "tools": "debugging",
    "tools.display": "debugging.displays",
    "transforms.branching": "transforms.control_flow.cond_switch",
    "transforms.carrying": "transforms.control_flow.rounds",
    "transforms.checking": "transforms.checkify",
    "transforms.contexts": "interop.graph_contexts.contexts",
    "transforms.crossing.captures": "transforms.crossing.traces.captures",
    "transforms.crossing.repeated_calls": "transforms.crossing.plans.repeated_calls",
    "transforms.crossing.traces": "transforms.crossing.traces.traces",
    "transforms.custom_vjp": "transforms.derivatives.custom_vjp",
    "transforms.decorators": "transforms.crossing.decorators",
    "transforms.jacobian_products": "transforms.derivatives.vjp_jvp",
    "transforms.jit": "transforms.compiled.jit",
    "transforms.loops": "transforms.control_flow.loops",
    "transforms.mapping": "transforms.mapped.vmap_pmap",
    "transforms.node_states": "interop.graph_contexts.node_states",
    "transforms.partials": "transforms.compiled.partials",
    "transforms.prefixes": "transforms.crossing.prefixes",
    "transforms.scan": "transforms.control_flow.scan",
    "transforms.shard_map": "transforms.mapped.shard_map",
    "transforms.stages": "transforms.compiled.stages",
    "transforms.tree_prefixes": "transforms.crossing.prefixes",
}


class _Finder(abc.MetaPathFinder, abc.Loader):
    """Finds the modules of `MOVED`, each when it is first asked for."""

    def find_spec(
        self, fullname: str, path: Any, target: Any = None
    ) -> machinery.ModuleSpec | None:
        """The module of a moved file; ``None`` for any other name."""
        name = fullname.removeprefix("graftree.")
        if name == fullname or name not in MOVED:
            return None
        return machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: machinery.ModuleSpec) -> types.ModuleType:
        """A module that finds its names elsewhere."""
        module = types.ModuleType(spec.name)
        _find_elsewhere(module)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Does nothing: the module is complete."""


def _find_elsewhere(module: types.ModuleType) -> None:
    """Gives a module the names that the file of its name had."""
    places = MOVED[module.__name__.removeprefix("graftree.")].split()
    setattr(module, "__getattr__", _finder(module.__name__, places))  # noqa: B010


def _finder(old: str, places: list[str]) -> Callable[[str], Any]:
    def find(name: str) -> Any:
        for place in places:
            found = vars(importlib.import_module(f"graftree.{place}"))
            if name in found and not name.startswith("__"):
                return found[name]
        raise AttributeError(f"Module {old} has no attribute {name!r}.")

    return find


def install() -> None:
    """Makes the old names importable; the public namespace calls it once.

    Example:
        >>> from graftree.core.skeletons import GraphDef
        >>> GraphDef is nnx.GraphDef
        True
    """
    sys.meta_path.append(_Finder())
    for name in MOVED:
        # These are folders now, which the import system finds by itself.
        if (package := sys.modules.get(f"graftree.{name}")) is not None:
            _find_elsewhere(package)
