"""The traces of a compiled function: what each depended on, for people who ask why.

A `Trace` is noted when a function was traced: the signature of the call, the types of
its leaves, the configuration of JAX. A `Placement` is noted when JAX compiled what was
traced: on which devices the leaves are, since JAX compiles a trace again for others
(`follow`). `heed` warns of a static attribute that makes a trace for each value.

That takes microseconds, and nothing in a call that isn't traced. It holds no arrays,
tracers or objects: signatures are referred to weakly, and live as long as JAX keeps
what it compiled for them.

What a trace depended on is told as facts by path, so that `differences.between` finds
what differs between two traces, or between two placements:

    ("net", "blocks", 3, "rate")         Static(0.1)           of `differences.facts`
    ("net", "kernel", "tag")             Static("x")           metadata, the same
    ("x",), ("x", TYPE)                  LEAF, float32[8,16]   what JAX knows of a leaf
    (Setting("jax_enable_x64"),)         False                 the configuration of JAX
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import logging
import reprlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any, NamedTuple

import jax
import numpy as np

from graftree import _jax, _python
from graftree.core import paths
from graftree.core.graph import differences, flattening
from graftree.core.graph.differences import Node
from graftree.core.graph.flattening import IndexMap
from graftree.core.graph.graphdefs import LEAF, GraphDef, Static
from graftree.core.pickling import Rebuilt
from graftree.transforms.crossing import decorators, packing, signatures
from graftree.transforms.crossing.signatures import Signature

# How many traces of one function are remembered, the latest, and placements of each.
LIMIT, PLACEMENTS = 16, 8


@dataclasses.dataclass(frozen=True)
class Placed:
    """Where an array is.

    Attributes:
        sharding: Its sharding.
        is_committed: Whether it has to stay there.
    """

    sharding: Any
    is_committed: bool


# For each leaf a `Placed`, ``None`` for what is no array of JAX, or a pytree of such.
Placement = Sequence[Any]


@dataclasses.dataclass(frozen=True)
class Trace:
    """What one trace of a function depended on.

    Attributes:
        number: Counted from 1.
        signature: The static part of the arguments, while JAX keeps it.
        types: What JAX knows of each leaf: an abstract value, or a pytree of such.
        settings: JAX's configuration and context, by name.
        placements: For which placements of the leaves it was compiled.
    """

    number: int
    signature: weakref.ref[Signature]
    types: Sequence[Any]
    settings: Mapping[str, Any]
    placements: list[Placement] = dataclasses.field(default_factory=list)


class Traces(Rebuilt):
    """The traces of one compiled function.

    Attributes:
        count: How many there were; those of calls that raised are not counted.
        is_told: Whether the user was told of what makes them all (see `heed`).
    """

    def __init__(self) -> None:
        self.count = 0
        self.is_told = False
        self._latest: collections.deque[Trace] = collections.deque(maxlen=LIMIT)

    def listed(self) -> list[Trace]:
        """The latest traces, in order."""
        return [*self._latest]

    def add(self, signature: Signature, values: Sequence[Any]) -> None:
        """Notes a trace for arguments with these raw values, which are tracers."""
        if _jax.config.jax_disable_jit:
            return  # the function ran as it is
        settings = _jax.trace_context()
        self.count += 1
        types = [*map(_type_of, values)]
        self._latest.append(Trace(self.count, weakref.ref(signature), types, settings))

    def add_placement(self, signature: Signature, values: Sequence[Any]) -> None:
        """Notes that JAX compiled what it had traced for these raw values."""
        if any(isinstance(x, _jax.Tracer) for x in jax.tree.leaves(values)):
            return  # part of another program
        types = [*map(_type_of, values)]
        for trace in reversed(self.listed()):
            if trace.signature() is signature and trace.types == types:
                placement = [jax.tree.map(_placed, value) for value in values]
                known = trace.placements
                if placement not in known and len(known) < PLACEMENTS:
                    known.append(placement)
                return


def _type_of(value: Any) -> Any:
    if isinstance(value, _jax.Tracer):
        return jax.typeof(value)
    return jax.tree.map(jax.typeof, value)  # of a Variable that holds a container


def _placed(x: Any) -> Placed | None:
    return Placed(x.sharding, x.committed) if isinstance(x, jax.Array) else None


# So many traces in a row, of which each differs from the one before in one value.
COUNT = 3


def heed(traces: Traces, function: Callable[..., Any]) -> None:
    """Says which attribute it is, if the latest traces differ in one alone."""
    latest = traces.listed()[-COUNT:]
    if len(latest) < COUNT or traces.is_told:
        return
    # To list facts takes as long as tracing some layers.
    if any(_is_otherwise(x, y) for x, y in itertools.pairwise(latest)):
        return
    facts = [found for found in map(of_trace, latest) if found is not None]
    changes = [differences.between(x, y) for x, y in itertools.pairwise(facts)]
    distinct = {change.path for found in changes for change in found}
    # Values that are not equal to themselves differ, and nothing can be said of it.
    if len(distinct) != 1 or [*map(len, changes)] != [1] * (COUNT - 1):
        return
    (path,) = distinct
    values = [changes[0][0].before, *[found[0].after for found in changes]]
    # What is passed as a static argument was meant so.
    if len(path) > 1 and all(isinstance(value, Static) for value in values):
        traces.is_told = True
        _tell(path, [value.value for value in values], function)


def _is_otherwise(one: Trace, other: Trace) -> bool:
    """Whether anything but their signatures tells two traces apart, or nothing."""
    return (
        one.signature() is other.signature()
        or one.types != other.types
        or one.settings != other.settings
    )


def _tell(path: Any, values: list[Any], function: Callable[..., Any]) -> None:
    logging.getLogger("graftree").warning(
        "%s is traced and compiled for each value of the static attribute %s, the "
        "latest being %s. If it changes as the program runs, make it a Variable, whose "
        "value is no part of the program; if it is the same made anew, as an optimizer "
        "or a lambda is, make it once. nnx.debugging.explain_recompile tells more.",
        decorators.name_of(function),
        signatures.name_of(path),
        ", ".join(map(_SHORT.repr, values)),
    )


# Functions within an optimizer have long names.
_SHORT = reprlib.Repr()
_SHORT.maxother = 60


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


_EVENT = "/jax/core/compile/backend_compile_duration"


@functools.cache
def follow(*callers: CodeType) -> None:
    """Notes the placements of arrays for which calls were compiled.

    Args:
        *callers: The code of the methods that call what JAX compiled; they have
            ``self``, with the attribute ``traces``, and ``groups``.
    """

    def heed(event: str, duration_secs: float, **facts: Any) -> None:
        if event != _EVENT:
            return
        frame = _python.frame_above(1)
        while frame is not None:
            given = _python.locals_of(frame) if frame.f_code in callers else {}
            if "groups" in given:
                signature, values, _roles = packing.join(given["groups"])
                traces = given["self"].traces
                if traces is not None:  # a plan of what JAX does not compile
                    traces.add_placement(signature, values)
                return
            frame = frame.f_back

    jax.monitoring.register_event_duration_secs_listener(heed)
