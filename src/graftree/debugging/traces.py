"""The traces of a compiled function: their dependencies, to explain why each was made.

A `Trace` is noted when a function was traced: the signature of the call, the types of
its leaves, the configuration of JAX. A `Placement` is noted when JAX compiled a trace:
the devices of the leaves, since JAX compiles a trace again for others. The reports on
them are in ``recompiles.py``; `Traces` calls it where traces repeat.

That takes microseconds, and nothing in a call that isn't traced. It holds no arrays,
tracers or objects: signatures are referred to weakly, and live as long as JAX keeps
their compiled programs.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from graftree import _jax, _python
from graftree.core.pickling import Rebuilt
from graftree.transforms.compiled import jit
from graftree.transforms.crossing import packing
from graftree.transforms.crossing.plans import Plan
from graftree.transforms.crossing.signatures import Signature

# How many traces of one function are remembered, the latest, and placements of each.
LIMIT, PLACEMENTS = 16, 8


@dataclasses.dataclass(frozen=True)
class Placed:
    """The place of an array.

    Attributes:
        sharding: Its sharding.
        is_committed: Whether it has to stay there.
    """

    sharding: Any
    is_committed: bool


# For each leaf a `Placed`, ``None`` if it is not an array of JAX, or a pytree of these.
Placement = Sequence[Any]


@dataclasses.dataclass(frozen=True)
class Trace:
    """The dependencies of one trace of a function.

    Attributes:
        number: Counted from 1.
        signature: The static part of the arguments, while JAX keeps it.
        types: JAX's type of each leaf: an abstract value, or a pytree of such.
        settings: JAX's configuration and context, by name.
        placements: The placements of the leaves for which it was compiled.
    """

    number: int
    signature: weakref.ref[Signature]
    types: Sequence[Any]
    settings: Mapping[str, Any]
    placements: list[Placement] = dataclasses.field(default_factory=list)


# So many traces in a row, of which each differs from the one before in its signature.
COUNT = 3

# Called with these traces and the function; returns whether it has warned the user.
Warn = Callable[[Sequence[Trace], Callable[..., Any]], bool]


class Traces(Rebuilt):
    """The traces of one compiled function.

    Args:
        warn: Called when the latest traces differ only in signatures, until it warns.

    Attributes:
        count: How many there were; those of calls that raised are not counted.
        latest: The latest traces, in order.
        is_told: Whether the user was warned.
    """

    def __init__(self, warn: Warn) -> None:
        _follow()
        self.count = 0
        self.is_told = False
        self.latest: collections.deque[Trace] = collections.deque(maxlen=LIMIT)
        self._warn = warn

    def add(
        self, signature: Signature, values: Sequence[Any], function: Callable[..., Any]
    ) -> None:
        """Notes a trace of a function for these raw values, which are tracers."""
        if _jax.config.jax_disable_jit:
            return  # the function ran as it is
        settings = _jax.trace_context()
        self.count += 1
        # That of a Variable may be a container.
        types = jax.tree.map(jax.typeof, [*values])
        self.latest.append(Trace(self.count, weakref.ref(signature), types, settings))
        repeated = [*self.latest][-COUNT:]
        if len(repeated) < COUNT or self.is_told:
            return
        if not any([_is_otherwise(*pair) for pair in itertools.pairwise(repeated)]):
            self.is_told = self._warn(repeated, function)

    def add_placement(self, signature: Signature, values: Sequence[Any]) -> None:
        """Notes that JAX compiled its trace for these raw values."""
        if any([isinstance(x, _jax.Tracer) for x in jax.tree.leaves(values)]):
            return  # part of another program
        types = jax.tree.map(jax.typeof, [*values])
        for trace in reversed([*self.latest]):  # another thread may add one meanwhile
            if trace.signature() is signature and trace.types == types:
                placement = jax.tree.map(_placed, [*values])
                known = trace.placements
                if placement not in known and len(known) < PLACEMENTS:
                    known.append(placement)
                return


def _placed(x: Any) -> Placed | None:
    return Placed(x.sharding, x.committed) if isinstance(x, jax.Array) else None


def _is_otherwise(one: Trace, other: Trace) -> bool:
    """Whether anything but their signatures tells two traces apart, or nothing."""
    return (
        one.signature() is other.signature()
        or one.types != other.types
        or one.settings != other.settings
    )


_EVENT = "/jax/core/compile/backend_compile_duration"
# The methods that call compiled functions: they have ``self``, with the attribute
# ``traces``, and ``groups``.
_CALLERS = jit.JitWrapped.__call__.__code__, Plan.call.__code__


@functools.cache
def _follow() -> None:
    """Notes the placements of arrays for which calls were compiled."""

    def heed(event: str, duration_secs: float, **facts: Any) -> None:
        if event != _EVENT:
            return
        for frame in _python.frames_above(1):
            given = _python.locals_of(frame) if frame.f_code in _CALLERS else {}
            if "groups" in given:
                signature, values, _roles = packing.join(given["groups"])
                traces = given["self"].traces
                if traces is not None:  # a plan of a function that JAX does not compile
                    traces.add_placement(signature, values)
                return

    jax.monitoring.register_event_duration_secs_listener(heed)
