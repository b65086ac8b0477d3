"""What the traces of a compiled function depended on, by path; a warning of values.

The facts of a trace are a mapping, so that `differences.between` finds what differs
between two traces, or between two placements:

    ("net", "blocks", 3, "rate")         Static(0.1)           of `differences.facts`
    ("net", "kernel", "tag")             Static("x")           metadata, the same
    ("x",), ("x", TYPE)                  LEAF, float32[8,16]   what JAX knows of a leaf
    (Setting("jax_enable_x64"),)         False                 the configuration of JAX

If a static attribute makes a trace for each of its values, the user is warned at once.
"""

from __future__ import annotations

import itertools
import logging
import reprlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from graftree.core import paths
from graftree.core.graph import differences, flattening
from graftree.core.graph.differences import Node
from graftree.core.graph.flattening import IndexMap
from graftree.core.graph.graphdefs import LEAF, GraphDef, Static
from graftree.transforms.crossing import decorators, packing, signatures, traces
from graftree.transforms.crossing.signatures import Signature
from graftree.transforms.crossing.traces import Placed, Trace

Path = tuple[Any, ...]
Facts = dict[Path, Any]


class Aspect(str):
    """The last key of a path to what is known of an argument or leaf besides."""


class Setting(str):
    """The only key of a path to a part of JAX's configuration or context."""


class OnMesh(NamedTuple):
    """The sharding that is part of a type: over the axes of a mesh."""

    mesh: Any
    spec: Any


# How an argument was passed; what JAX calls the abstract value of an array.
PASSED, TYPE = Aspect("passed"), Aspect("type")


def of_trace(trace: Trace) -> Facts | None:
    """All that a trace of a function depended on; ``None`` if it isn't kept."""
    signature = trace.signature()
    if signature is None:
        return None
    settings: Facts = {(Setting(key),): x for key, x in trace.settings.items()}
    return _of_arguments(signature, trace.types) | settings


def of_placements(trace: Trace) -> list[Facts]:
    """Where the arguments were, for each compilation of a trace, if it has several."""
    signature, placements = trace.signature(), [*trace.placements]
    if signature is None or len(placements) < 2:
        return []
    return [_of_arguments(signature, placement) for placement in placements]


def _of_arguments(signature: Signature, types: Sequence[Any]) -> Facts:
    """The facts about arguments, which are put together with marks for their leaves."""
    marks = [np.asarray(position) for position in range(len(types))]
    (args, kwargs), _ = packing.unpack(signature, marks, IndexMap())
    name, places, static = (
        signature.name_of_argument,
        signature.places(),
        signature.statics,
    )
    starts = [*map(name, places)]
    found: Facts = {(name(where),): value for where, value in static}
    for where in (*dict(static), *places):
        how = "by position" if isinstance(where, int) else "by keyword"
        found[name(where), PASSED] = how
    # In one walk, since arguments may share objects.
    graphdef, leaves = flattening.flatten_graph((*args, *kwargs.values()))
    found |= _of_objects(graphdef, starts)
    for (number, *keys), leaf in zip(graphdef.paths(), leaves, strict=True):
        kind = types[int(flattening.raw_of(leaf))]
        found |= _of_leaf((starts[number], *keys), kind)
    return found


def _of_objects(graphdef: GraphDef[Any], starts: Sequence[str]) -> Facts:
    """The facts of the skeleton of a tuple of arguments with these names."""

    def located(path: Path) -> Path | None:
        return (starts[path[0]], *path[1:]) if path else None

    found = differences.facts(graphdef, located)
    for path, fact in [*found.items()]:
        if isinstance(fact, Node) and fact.type is GraphDef:
            treedef, _ = fact.metadata
            skeleton = treedef.unflatten(())
            found |= differences.facts(skeleton, differences.below(path))
    return found


def _of_leaf(path: Path, kind: Any) -> Facts:
    """The facts about a leaf; if its value is a container, about each array in it."""
    found: Facts = {}
    for below, x in jax.tree_util.tree_flatten_with_path(kind)[0]:
        start = (*path, *paths.from_jax(below))
        if below:
            found[start] = LEAF
        found[*start, TYPE] = x
    return found


def aspects(x: Any) -> dict[str, Any]:
    """What JAX tells apart in the type of an array or ref, or in where an array is."""
    if isinstance(x, Placed):
        return {"sharding": x}
    aval = getattr(x, "inner_aval", x)
    found = {word: getattr(aval, name, None) for name, word in _ASPECTS.items()}
    return {**found, "sharding": _sharding_in(aval)}


_ASPECTS = {
    "shape": "shape",
    "dtype": "dtype",
    "weak_type": "weak type",
    "memory_space": "memory space",
    "vma": "manual axes",
}


def _sharding_in(aval: Any) -> Any:
    """The mesh, and the sharding over its axes, that are part of a type."""
    sharding: Any = getattr(aval, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    if mesh is None or mesh.empty:
        return None
    entries = [*sharding.spec]
    while entries and entries[-1] is None:
        entries.pop()
    return OnMesh(mesh, jax.sharding.PartitionSpec(*entries))


# A warning.


def _warn_of_values(latest: Sequence[Trace], function: Callable[..., Any]) -> bool:
    """Says which attribute it is, if the latest traces differ only in one."""
    # To list facts takes as long as tracing some layers.
    facts = [found for found in map(of_trace, latest) if found is not None]
    changes = [differences.between(x, y) for x, y in itertools.pairwise(facts)]
    distinct = {change.path for found in changes for change in found}
    # Values that are not equal to themselves differ, and nothing can be said of it.
    if len(distinct) != 1 or [*map(len, changes)] != [1] * (len(latest) - 1):
        return False
    (path,) = distinct
    values = [changes[0][0].before, *[found[0].after for found in changes]]
    # What is passed as a static argument was meant so.
    if len(path) < 2 or not all(isinstance(value, Static) for value in values):
        return False
    logging.getLogger("graftree").warning(
        "%s is traced and compiled for each value of the static attribute %s, the "
        "latest being %s. If it changes as the program runs, make it a Variable, whose "
        "value is not part of the program; if it is a new object each "
        "time, such as an optimizer or a lambda, create it once. "
        "nnx.debugging.explain_recompile says more.",
        decorators.name_of(function),
        signatures.name_of(path),
        ", ".join([_SHORT.repr(value.value) for value in values]),
    )
    return True


# Functions within an optimizer have long names.
_SHORT = reprlib.Repr()
_SHORT.maxother = 60

traces.on_repetition(_warn_of_values)
