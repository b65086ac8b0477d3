"""Traces of a compiled function: their dependencies, to explain why each was made.

A `Trace` is recorded when a function was traced: the signature of the call, the types
of its leaves, the configuration of JAX. The placements of the leaves are added when JAX
compiles the trace, which it does again for others. The reports are made in
``recompiles.py``; `Traces` calls it where traces repeat.

That takes microseconds, and nothing in a call that isn't traced. It holds no arrays,
tracers or objects: signatures are referred to weakly, and live as long as JAX keeps
their compiled programs. A value that is a pytree of the user's own stands for its
leaves: no code of the user's is called, neither to build one nor to compare two.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from graftree import _jax
from graftree.core.pickling import Rebuilt
from graftree.transforms.lifting import programs
from graftree.transforms.lifting.signatures import Signature

# How many traces of one function are remembered, the latest, and placements of each.
LIMIT, PLACEMENTS = 16, 8


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where an array is.

    Attributes:
        sharding: Its sharding.
        is_committed: Whether it has to stay there.
    """

    sharding: Any
    is_committed: bool


class ArrayFact(NamedTuple):
    """An array in a value, or the value itself.

    Attributes:
        value: The number of the value.
        path: Where it is in the value.
        fact: JAX's type of it; or a `Placement`, ``None`` if it is not an array of JAX.
    """

    value: int
    path: tuple[Any, ...]
    fact: Any


def array_types(values: Sequence[Any]) -> list[ArrayFact]:
    """Lists the types of the arrays in raw values."""
    types: list[ArrayFact] = []
    for number, value in enumerate(values):
        if isinstance(value, jax.Array):
            types.append(ArrayFact(number, (), jax.typeof(value)))
            continue
        leaves, _ = jax.tree_util.tree_flatten_with_path(value)
        for index, (path, leaf) in enumerate(leaves):
            types.append(ArrayFact(number, _plain(path, index), jax.typeof(leaf)))
    return types


def _plain(path: Sequence[Any], index: int) -> tuple[Any, ...]:
    """Replaces keys of the user's own types in a path of JAX's by an index."""
    return tuple([_plain_key(key, index) for key in path])


def _plain_key(jax_key: Any, index: int) -> str | int:
    for name in ("key", "idx", "name"):
        key = getattr(jax_key, name, None)
        if isinstance(key, (str, int)) and type(key) in (str, int):
            return key
    return index


@dataclasses.dataclass(frozen=True)
class Trace:
    """What one trace of a function depended on.

    Attributes:
        number: Counted from 1.
        signature: The static part of the arguments, while JAX keeps it.
        types: JAX's types of the arrays in the arguments.
        context: JAX's configuration and ours; see `_jax.settings_in`.
        placements: The placements of these arrays for which it was compiled.
    """

    number: int
    signature: weakref.ref[Signature]
    types: list[ArrayFact]
    context: tuple[tuple[str, Any], ...]
    placements: list[list[Placement | None]] = dataclasses.field(default_factory=list)


# So many traces in a row, of which each differs from the one before in its signature.
COUNT = 3

# Called with these traces and the function; returns whether it has warned the user.
Warn = Callable[[Sequence[Trace], Callable[..., Any]], bool]


class Traces(Rebuilt):
    """Record of the traces of one compiled function.

    Args:
        warn: Called when the latest traces differ only in signatures, until it warns.

    Attributes:
        count: How many there were; those of calls that raised are not counted.
        latest: The latest traces, in order.
        has_warned: Whether the user was warned.
    """

    def __init__(self, warn: Warn) -> None:
        programs.count_compilations()
        self.count = 0
        self.has_warned = False
        self.latest: collections.deque[Trace] = collections.deque(maxlen=LIMIT)
        self._warn = warn

    def add(
        self, signature: Signature, values: Sequence[Any], function: Callable[..., Any]
    ) -> None:
        """Records a trace of a function for these raw values, which are tracers."""
        if _jax.config.jax_disable_jit:
            return  # the function ran as it is
        context = _jax.trace_context()
        self.count += 1
        types = array_types(values)
        self.latest.append(Trace(self.count, weakref.ref(signature), types, context))
        repeated = [*self.latest][-COUNT:]
        if len(repeated) < COUNT or self.has_warned:
            return
        if not any([_differ_otherwise(*pair) for pair in itertools.pairwise(repeated)]):
            self.has_warned = self._warn(repeated, function)

    def called(self, signature: Signature, values: Sequence[Any], count: int) -> None:
        """Records where the raw values of a call are, if JAX compiled for it.

        Args:
            signature: That of the call.
            values: Its raw values; their buffers may be gone.
            count: How many programs JAX had compiled before the call.
        """
        arrays = jax.tree.leaves(values)
        is_part = any([isinstance(x, _jax.Tracer) for x in arrays])
        if is_part or not programs.compilations.are_there_since(count):
            return  # part of another program, or for another thread
        types = array_types(values)
        for trace in reversed([*self.latest]):  # another thread may add one meanwhile
            if trace.signature() is signature and trace.types == types:
                placed = [
                    Placement(x.sharding, x.committed)
                    if isinstance(x, jax.Array)
                    else None
                    for x in arrays
                ]
                placements = trace.placements
                if placed not in placements and len(placements) < PLACEMENTS:
                    placements.append(placed)
                return


def _differ_otherwise(one: Trace, other: Trace) -> bool:
    """Whether two traces differ in more than their signatures, or in nothing."""
    return (
        one.signature() is other.signature()
        or one.types != other.types
        or one.context != other.context
    )
