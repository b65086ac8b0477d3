"""``while_loop`` and ``fori_loop`` over objects."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, overload

import jax

from graftree import _jax, config
from graftree.config import Propagation
from graftree.core.graph.graphdefs import Interned
from graftree.core.variables.variables import Variable
from graftree.transforms.control_flow.loop_bodies import Carry, Loop, Place, Step
from graftree.transforms.crossing import debug_info, programs
from graftree.transforms.crossing.outside import Call
from graftree.transforms.crossing.packing import Values
from graftree.transforms.crossing.prefixes import Prefix
from graftree.transforms.crossing.rows import Keywords, Row
from graftree.transforms.crossing.signatures import Labels

T = TypeVar("T")


@overload
def while_loop(
    cond_fun: Callable[[T], Any],
    body_fun: Callable[[T], T],
    init_val: T,
    *,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> T: ...
@overload  # a number may begin what is an array from the first round on
def while_loop(
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[[Any], T],
    init_val: Any,
    *,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> T: ...
def while_loop(
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[[Any], Any],
    init_val: Any,
    *,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Applies a function while a condition holds, with ``jax.lax.while_loop``.

    Args:
        cond_fun: Says for a value whether to continue. What it writes is dropped.
        body_fun: Returns the next value: the same objects, in the same structure.
        init_val: The initial value; it may contain objects.
        graph: The mode; ``None`` takes the default.
        graph_updates: Whether the objects keep their identity, or just their Variables.

    Returns:
        The last value. Its objects are the caller's own; without graph updates, only
        their Variables are.

    Raises:
        ValueError: If the body returns other objects; for aliases that the mode
            doesn't allow.
        TypeError: If the structure of the value changes; it is also a ``ValueError``.

    Example:
        >>> counter = nnx.Variable(jnp.array(0))
        >>> def increase(counter):
        ...     counter[...] += 1
        ...     return counter
        >>> last = nnx.while_loop(lambda counter: counter < 3, increase, counter)
        >>> last is counter, int(counter)
        (True, 3)
    """
    row = _row("while_loop", config.propagation(graph, graph_updates))

    def traced(*groups: Values) -> Any:
        # The condition would not see what the body writes to a ref.
        loop = Loop(row, _PLACE, groups, moves_refs=True)

        def go_on(carried: Values) -> Any:
            answer = loop.inside(carried).run(cond_fun)
            return answer.get_value() if isinstance(answer, Variable) else answer

        def steps(step: Step) -> Any:
            def once(carried: Values) -> Values:
                return step(body_fun, carried)[0]

            going = debug_info.named_after(cond_fun, go_on, has_own_names=True)
            named = debug_info.named_after(body_fun, once)
            return jax.lax.while_loop(going, named, loop.initial), ()

        return loop.run(steps)

    with _jax.hidden_frames:
        return _run(row, body_fun, traced, init_val)


@overload
def fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable[[Any, T], T],
    init_val: T,
    *,
    unroll: int | bool | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> T: ...
@overload
def fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable[[Any, Any], T],
    init_val: Any,
    *,
    unroll: int | bool | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> T: ...
def fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable[[Any, Any], Any],
    init_val: Any,
    *,
    unroll: int | bool | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Applies a function for each integer of a range, with ``jax.lax.fori_loop``.

    Args:
        lower: The first integer.
        upper: The integer after the last one.
        body_fun: Called as ``body_fun(i, value)``; see `while_loop`.
        init_val: The initial value; it may contain objects.
        unroll: As in ``jax.lax.fori_loop``.
        graph: The mode; ``None`` takes the default.
        graph_updates: See `while_loop`.

    Returns:
        The last value; see `while_loop`.

    Raises:
        ValueError: See `while_loop`.
        TypeError: See `while_loop`.

    Example:
        >>> total = nnx.Variable(jnp.array(0))
        >>> def add(i, total):
        ...     total[...] += i
        ...     return total
        >>> int(nnx.fori_loop(0, 4, add, total))
        6
    """
    row = _row("fori_loop", config.propagation(graph, graph_updates))

    def traced(*groups: Values) -> Any:
        loop = Loop(row, _PLACE, groups)

        def steps(step: Step) -> Any:
            def once(i: Any, carried: Values) -> Values:
                return step(lambda value: body_fun(i, value), carried)[0]

            first = debug_info.read(debug_info.source_of(body_fun)).at(0)
            named = debug_info.named_after(body_fun, once, [first])
            # JAX can differentiate it in reverse if it knows the number of steps.
            last = jax.lax.fori_loop(lower, upper, named, loop.initial, unroll=unroll)
            return last, ()

        return loop.run(steps)

    with _jax.hidden_frames:
        return _run(row, body_fun, traced, init_val)


def _run(row: Row, body: Callable[..., Any], traced: Any, init_val: Any) -> Any:
    run = functools.partial(programs.run, body, traced, name=row.name)
    return Call(body, row, (init_val,), {}).run(run)


_LABELS = {
    "while_loop": Labels(named={0: "init_val"}),
    "fori_loop": Labels(named={0: "init_val"}, skipped=1),
}
_PLACE = Place(
    argument=0,
    identity="The body must return the same reference and pytree structure as the "
    "initial value",
)


def _row(name: str, mode: Propagation) -> Row:
    return Row(
        name,
        mode,
        Prefix(((Carry,), 0), "init_val", name, mode),
        Prefix(Carry, "init_val", name, mode),
        keywords=(Keywords.STAY, Keywords.STAY),
        labels=_LABELS[name],
        signatures=_signatures,
    )


_signatures = Interned()
