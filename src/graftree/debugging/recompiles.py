"""Why a compiled function was traced again: `explain_recompile`, `at_most_traces`.

A function made by `nnx.jit` notes what each of its traces depended on. A trace is
compared with the earlier one that differs from it least.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from graftree import errors
from graftree.core.text import columns
from graftree.debugging import causes
from graftree.debugging.causes import Cause
from graftree.transforms.compiled.jit import JitWrapped
from graftree.transforms.crossing import decorators, traces
from graftree.transforms.crossing.traces import Facts

# How much of a table is printed: the latest traces, some rows of each.
_MOST_TRACES, _MOST_ROWS = 6, 5


class Explanation:
    """The answer of `explain_recompile`, which prints as a table.

    Attributes:
        name: The name of the function.
        traces: How often it was traced.
        recompiles: How often what had been traced was compiled again, for other
            placements of arrays.
        rows: All differences, trace by trace; see `causes.Cause`.

    Example:
        >>> double = nnx.jit(lambda x: 2 * x)
        >>> doubled = [double(x) for x in (jnp.ones(2), jnp.ones(3))]
        >>> found = nnx.debugging.explain_recompile(double)
        >>> found.traces, [(row.path, row.was, row.now) for row in found.rows]
        (2, [('x', '(2,)', '(3,)')])
    """

    def __init__(
        self, name: str, traces: int, recompiles: int, rows: Sequence[Cause]
    ) -> None:
        self.name = name
        self.traces = traces
        self.recompiles = recompiles
        self.rows = tuple(rows)

    def table(self, remark: str = "") -> str:
        """The text of it, with a remark in the title."""
        times = _times(self.traces)
        title = f"{self.name} was {f'traced {times}' if self.traces else 'not traced'}"
        if self.recompiles:
            title += f" and compiled again {_times(self.recompiles)}"
        title += remark
        if not self.rows:
            return f"{title}."
        return "\n".join([f"{title}, because of:", *_table(self.rows)])

    __repr__ = table


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def explain_recompile(f: Callable[..., Any]) -> Explanation:
    """Says why a compiled function was traced again.

    JAX traces and compiles a function again when it is called with something that the
    compiled program depends on and that it has not seen: another shape or dtype,
    another static attribute or argument, another structure of a model, another
    configuration of JAX. Each trace is compared with the nearest earlier one, and each
    difference is listed with its path.

    Nothing needs to be switched on before. The latest 16 traces of a function are
    known, as long as JAX keeps what it compiled for them.

    Args:
        f: What `nnx.jit`, `nnx.jit_partial` or, of such a function,
            `nnx.cached_partial` or ``functools.partial`` gave; also a bound method
            that is decorated with `nnx.jit`.

    Returns:
        An object that prints as a table, and has the attributes ``traces``, the number
        of traces, and ``rows``, one `Cause` for each difference: ``trace``,
        ``against``, ``path``, ``what``, ``was``, ``now``.

    Raises:
        TypeError: If ``f`` was not made by `nnx.jit`.

    Example:
        >>> @nnx.jit
        ... def step(net, x):
        ...     return net(x)
        >>> net = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> y = step(net, jnp.ones((4, 2)))
        >>> y = step(net, jnp.ones((5, 2)))
        >>> nnx.debugging.explain_recompile(step)
        step was traced twice, because of:
          trace  against  path  what   was     now
          2      1        x     shape  (4, 2)  (5, 2)
    """
    jitted = _jitted(f, "explain_recompile")
    return _explain(jitted)


@contextlib.contextmanager
def at_most_traces(f: Callable[..., Any], n: int) -> Iterator[None]:
    """Fails if a compiled function is traced more than ``n`` times in a block.

    For tests: a training loop should trace its step once.

    Args:
        f: As in `explain_recompile`.
        n: How many traces are fine; 0 if the function must not be traced at all.

    Raises:
        AssertionError: At the end of the block, if there were more traces; lists what
            differed. A block that raises fails with its own exception.
        TypeError: If ``f`` was not made by `nnx.jit`.

    Example:
        >>> double = nnx.jit(lambda x: 2 * x)
        >>> try:
        ...     with nnx.debugging.at_most_traces(double, 1):
        ...         for x in 1, 2, 3.0:
        ...             y = double(x)
        ... except AssertionError as error:
        ...     print(error)
        <lambda> was traced twice in a block that allows 1, because of:
          trace  against  path  what   was    now
          2      1        x     dtype  int32  float32
    """
    jitted = _jitted(f, "at_most_traces")
    before = jitted.traces.count
    yield
    count = jitted.traces.count - before
    if count > n:
        remark = f" in a block that allows {n}"
        raise AssertionError(_explain(jitted, after=before).table(remark))


def _jitted(f: Any, function: str) -> JitWrapped[..., Any]:
    """What `nnx.jit` gave, inside of what binds arguments to it."""
    inner = f
    while not isinstance(inner, JitWrapped):
        if isinstance(inner, functools.partial):
            inner = inner.func
        elif inspect.ismethod(inner):
            inner = inner.__func__
        elif hasattr(inner, "__wrapped__"):
            inner = inner.__wrapped__
        else:
            raise TypeError(_refusal(f, function))
    return inner


def _refusal(f: Any, function: str) -> str:
    kind = type(f).__name__
    given = f"{f.__name__} ({kind})" if hasattr(f, "__name__") else kind
    return errors.message(
        f"nnx.debugging.{function} expects a function made by nnx.jit, got {given}.",
        way_out="Only such functions note why they are traced: pass the one that is "
        "decorated with @nnx.jit.\nOf functions made by jax.jit, JAX itself tells: "
        'jax.config.update("jax_explain_cache_misses", True).',
    )


def _explain(jitted: JitWrapped[..., Any], after: int = 0) -> Explanation:
    """The explanation of the traces with higher numbers than ``after``."""
    known: list[tuple[int, Facts]] = []
    rows: list[Cause] = []
    recompiles = 0
    for trace in jitted.traces.listed():
        number, facts = trace.number, traces.of_trace(trace)
        if facts is None:
            rows += [Cause(number, None, "", _GONE, "", "")] * (number > max(after, 1))
            continue
        if number > max(after, 1):
            rows += _nearest(number, known, facts)
        known.append((number, facts))
        if number > after:
            compiled = traces.of_placements(trace)
            recompiles += len(compiled[1:])
            for count in range(1, len(compiled)):
                earlier = [(number, facts) for facts in compiled[:count]]
                rows += _nearest(number, earlier, compiled[count])
    name = decorators.name_of(jitted)
    return Explanation(name, jitted.traces.count - after, recompiles, rows)


def _nearest(
    number: int, earlier: Sequence[tuple[int, Facts]], facts: Facts
) -> list[Cause]:
    """What differs from the nearest earlier facts; of several, from the latest."""
    if not earlier:
        return [Cause(number, None, "", _DROPPED, "", "")]
    listed = []
    for against, before in reversed(earlier):
        same = [
            Cause(number, against, "", _SAME if before == facts else _OTHER, "", "")
        ]
        listed.append(causes.between(number, against, before, facts) or same)
    return min(listed, key=lambda found: (len(_alike(found)), len(found)))


# The table.

_HEADER = ("trace", "against", "path", "what", "was", "now")
# What is said instead of a row, by what differs.
_GONE, _DROPPED, _SAME, _OTHER = "gone", "unknown", "nothing", "other"
_REMARKS = {
    _GONE: "not known any more: JAX has dropped this trace",
    _DROPPED: "JAX had dropped all earlier traces, as after jax.clear_caches()",
    # A list is the same object in both, so what it was before can't be told.
    _SAME: "nothing that is known: JAX had dropped what it knew, as after "
    "jax.clear_caches(), or a list or dict in a static attribute was changed in place",
    _OTHER: "details of the structure that have no path",
}


def _table(rows: Sequence[Cause]) -> list[str]:
    numbers = list(dict.fromkeys(row.trace for row in rows))
    lines: list[tuple[str, ...]] = [_HEADER]
    for number in numbers[-_MOST_TRACES:]:
        groups = _alike([row for row in rows if row.trace == number])
        lines += [_cells(group) for group in groups[:_MOST_ROWS]]
        if len(groups) > _MOST_ROWS:
            rest = f"... and {len(groups) - _MOST_ROWS} more"
            lines.append((str(number), "", rest))
    if len(numbers) > _MOST_TRACES:
        lines.append(
            (f"... and those of {len(numbers) - _MOST_TRACES} earlier traces",)
        )
    return columns.aligned(lines, indent="  ")


def _alike(rows: Sequence[Cause]) -> list[list[Cause]]:
    """Rows in groups that differ only in where in the model something is."""
    groups: dict[Any, list[Cause]] = {}
    for row in rows:
        key = (row.path.rpartition(".")[2], *row[3:])
        groups.setdefault(key, []).append(row)
    return [*groups.values()]


def _cells(group: Sequence[Cause]) -> tuple[str, ...]:
    trace, against, path, what, *pair = group[0]
    start = str(trace), "-" if against is None else str(against)
    if what in _REMARKS:
        return (*start, _REMARKS[what])
    more = f" (+{len(group) - 1} alike)" if len(group) > 1 else ""
    return (*start, path + more, what, *map(_shortened, pair))


def _shortened(text: str, most: int = 40) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
