"""``while_loop`` and ``fori_loop`` over objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

import jax
import numpy as np

from graftree import _jax, config
from graftree.config import Propagation
from graftree.core.graph.graphdefs import Static
from graftree.core.variables.variables import Variable
from graftree.transforms.control_flow.loop_bodies import Loop, Step
from graftree.transforms.control_flow.rounds import Carry, Place
from graftree.transforms.crossing import guises, parameters
from graftree.transforms.crossing.outside import Call
from graftree.transforms.crossing.packing import Values
from graftree.transforms.crossing.rows import Keywords, Prefix, Row
from graftree.transforms.crossing.signatures import Labels, Signatures
from graftree.transforms.crossing.traces import captures

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
        cond_fun: Tells of a value whether to go on. What it writes is dropped.
        body_fun: Returns the next value: the same objects, in the same structure.
        init_val: The first value; it may contain objects.
        graph: The mode; ``None`` takes the default.
        graph_updates: Whether the objects (else just their Variables) keep identity.

    Returns:
        The last value. Its objects are the caller's own; without graph updates their
        Variables are.

    Raises:
        ValueError: If the body returns other objects; for aliases that the mode
            doesn't allow.
        TypeError: If the structure of the value changes; it is a ``ValueError``, too.

    Example:
        >>> counter = nnx.Variable(jnp.array(0))
        >>> def increase(counter):
        ...     counter[...] += 1
        ...     return counter
        >>> last = nnx.while_loop(lambda counter: counter < 3, increase, counter)
        >>> last is counter, int(counter)
        (True, 3)
    """
    mode = config.propagation(graph, graph_updates)
    with _jax.hidden_frames:
        call = Call(body_fun, _row("while_loop", mode), (init_val,), {})
        run = _while.get((cond_fun, body_fun), call.packed.signature, mode)
        return call.run(run)


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
        init_val: The first value; it may contain objects.
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
    mode = config.propagation(graph, graph_updates)
    with _jax.hidden_frames:
        call = Call(body_fun, _row("fori_loop", mode), (init_val,), {})
        # JAX can differentiate a loop in reverse only if it knows the number of steps.
        bounds = tuple(map(_static, (lower, upper)))
        known, given = (None, (lower, upper)) if None in bounds else (bounds, ())
        # As a `Static`: to unroll once is something else than to unroll all.
        key = known, Static(unroll)
        traces = _fori_between if given else _fori
        run = traces.get((body_fun,), call.packed.signature, mode, *key)
        return call.run(run, *given)


def _static(bound: Any) -> tuple[Any, Any] | None:
    """A bound that is known now, as something hashable: its type and its value."""
    if isinstance(bound, int):
        return int, bound
    is_known = isinstance(bound, (np.ndarray, np.integer, jax.Array))
    if is_known and not isinstance(bound, _jax.Tracer) and np.ndim(bound) == 0:
        return np.dtype(bound.dtype).type, int(bound)
    return None


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


_signatures = Signatures()


def _make_while(
    get_condition: Callable[[], Any], get_body: Callable[[], Any], mode: Propagation
) -> Callable[..., Any]:
    def traced(*groups: Values) -> Any:
        condition, body = get_condition(), get_body()
        # The condition would not see what the body writes to a ref.
        loop = Loop(_row("while_loop", mode), _PLACE, groups, moves_refs=True)

        def go_on(carried: Values) -> Any:
            answer = loop.inside(carried).run(condition)
            return answer.get_value() if isinstance(answer, Variable) else answer

        def steps(step: Step) -> Any:
            def once(carried: Values) -> Values:
                return step(body, carried)[0]

            going = guises.named_after(condition, go_on, has_own_names=True)
            named = guises.named_after(body, once)
            return jax.lax.while_loop(going, named, loop.initial), ()

        return loop.run(steps)

    return traced


def _make_fori(
    get_body: Callable[[], Any],
    mode: Propagation,
    known: tuple[Any, Any] | None,
    unroll: Static,
) -> Callable[..., Any]:
    def traced(*arguments: Any) -> Any:
        if known is None:
            lower, upper, *groups = arguments
        else:
            groups, (lower, upper) = arguments, [kind(value) for kind, value in known]
        body = get_body()
        loop = Loop(_row("fori_loop", mode), _PLACE, groups)

        def steps(step: Step) -> Any:
            def once(i: Any, carried: Values) -> Values:
                return step(lambda value: body(i, value), carried)[0]

            first = parameters.read(parameters.source_of(body)).at(0)
            named = guises.named_after(body, once, [first])
            options = {"unroll": unroll.value}
            return jax.lax.fori_loop(lower, upper, named, loop.initial, **options), ()

        return loop.run(steps)

    return traced


_while = captures.PerFunction("while_loop", _make_while)
_fori = captures.PerFunction("fori_loop", _make_fori)
_fori_between = captures.PerFunction("fori_loop", _make_fori, ("lower", "upper"))
