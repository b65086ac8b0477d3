"""Loops over objects: ``scan``, along an axis; ``while_loop`` and ``fori_loop``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any, TypeVar, overload

import jax

from graftree import _jax, config
from graftree.core.graph.graphdefs import Interned
from graftree.core.variables.variables import Variable
from graftree.transforms.control_flow.loop_bodies import Carry, CarrySpec, Loop
from graftree.transforms.lifting import caller, debug_info, decorators, programs
from graftree.transforms.lifting.dispatch import Calls
from graftree.transforms.lifting.leaves import Leaves
from graftree.transforms.lifting.prefixes import Prefix, StateAxes
from graftree.transforms.lifting.signatures import Labels
from graftree.transforms.lifting.specs import Keywords, TransformSpec

_NO_METADATA: Mapping[str, Any] = {}


@decorators.keeps_type
def scan(
    f: Any = decorators.MISSING,
    *,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    _split_transpose: bool = False,
    in_axes: Any = (Carry, 0),
    out_axes: Any = (Carry, 0),
    transform_metadata: Mapping[str, Any] = _NO_METADATA,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Applies a function step by step along axes of its arguments: ``jax.lax.scan``.

    An argument is the carry, which the function gets and returns in each step; or it is
    scanned, and each step gets a slice of it; or it is the same for all steps. Values
    that a step writes to a scanned Variable come back on the same axis. Writes to a
    Variable that is the same for all steps are kept without graph updates, and dropped
    with them. With graph updates, a step may set static attributes of the carry, as
    ``model.train()`` does, if later steps do the same.

    Args:
        f: The function.
        length: The number of steps, if nothing is scanned.
        reverse: Whether to begin with the last slice.
        unroll: As in ``jax.lax.scan``.
        in_axes: For each positional argument `Carry`, the axis to scan, or ``None``; a
            pytree prefix of these; for an object it may be a `StateAxes`, which may
            also have `Carry`. Just `Carry` if the carry is the only argument.
        out_axes: The same for the output, without ``None``.
        transform_metadata: ``{nnx.PARTITION_NAME: name}`` tells the annotations of the
            Variables about the axis.
        graph: The mode; ``None`` takes the default.
        graph_updates: Whether structural changes reach the caller's objects.

    Returns:
        The scanned function, or a decorator if ``f`` is not given. Objects in the carry
        that it returns are the caller's own; in tree mode and without graph updates,
        only their Variables are.

    Raises:
        ValueError: If the axes contain something that they can't, or ``f`` is a method
            bound to a Module; at a call, if a step returns other objects in the carry.
        TypeError: At a call, if the structure of the carry changes; it is also a
            ``ValueError``.

    Example:
        >>> @nnx.vmap
        ... def make_layers(key):
        ...     return nnx.Linear(2, 2, rngs=nnx.Rngs(key))
        >>> layers = make_layers(jax.random.split(jax.random.key(0), 5))
        >>> @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        ... def apply(x, layer):
        ...     return jnp.tanh(layer(x))
        >>> apply(jnp.ones(2), layers).shape
        (2,)
    """
    options = {
        "length": length,
        "reverse": reverse,
        "unroll": unroll,
        "_split_transpose": _split_transpose,
    }

    def make(function: Callable[..., Any]) -> Callable[..., Any]:
        mode = config.propagation(graph, graph_updates)
        inputs, outputs = (
            tuple(axes) if isinstance(axes, list) else axes
            for axes in (in_axes, out_axes)
        )
        carry_spec = _carry_spec(inputs, outputs)
        names = {} if carry_spec.argument is None else {carry_spec.argument: "carry"}
        spec = TransformSpec(
            "scan",
            mode,
            Prefix(inputs, "in_axes", "scan", mode, keywords=0),
            Prefix(outputs, "out_axes", "scan", mode),
            keywords=(Keywords.REFUSED, Keywords.BECOME_POSITIONAL),
            labels=Labels(named=names),
            axis_metadata=transform_metadata,
            signatures=Interned(),
            held=Carry,
        )
        _check_axes(spec.inputs, "in_axes")
        _check_axes(spec.outputs, "out_axes")
        return _scanned(function, spec.holding(function), carry_spec, options)

    return decorators.decorate(f, "scan", make)


def _scanned(
    f: Callable[..., Any],
    spec: TransformSpec,
    carry_spec: CarrySpec,
    options: dict[str, Any],
) -> Callable[..., Any]:
    def traced(*groups: Leaves) -> Any:
        loop = Loop(spec, carry_spec, groups)

        def body(carried: Leaves, scanned: Leaves) -> Any:
            return loop.step(lambda call: call.run(f), carried, scanned)

        named = debug_info.named_after(f, body)
        return loop.result(*jax.lax.scan(named, loop.initial, loop.scanned, **options))

    run = functools.partial(programs.run, f, traced, name="scan")
    calls = Calls(f, spec)

    @decorators.wraps(f)
    def scanned(*args: Any, **kwargs: Any) -> Any:
        count = len(args) + len(kwargs)
        if spec.inputs.tree[0] is Carry and count != 1:
            raise ValueError(
                "When in_axes=Carry, the function must take exactly one argument, got "
                f"{count} arguments in nnx.scan. Give in_axes as a tuple with one "
                "entry per argument."
            )
        with _jax.hidden_frames:
            return calls.run(run, args, kwargs)

    return scanned


def _carry_spec(in_axes: Any, out_axes: Any) -> CarrySpec:
    """Reads from the axes where the carry is; checks them."""
    argument = _find_carry(in_axes, "in_axes")
    output = _find_carry(out_axes, "out_axes")
    if (argument is None) != (output is None):
        raise ValueError(
            "If one of in_axes or out_axes has Carry, the other must also have "
            f"Carry. Got in_axes={in_axes!r}, out_axes={out_axes!r} in nnx.scan."
        )
    _check_outputs(out_axes)
    return CarrySpec(
        argument,
        None if out_axes is Carry else output,
        takes_changes=True,
        identity="Carry references must be the same between iterations",
    )


def _find_carry(axes: Any, argument: str) -> int | None:
    """Finds the index of `Carry` in a tuple of axes; 0 if it is all of them."""
    if axes is Carry:
        return 0
    axis_list = axes if isinstance(axes, tuple) else (axes,)
    indices = [i for i, axis in enumerate(axis_list) if axis is Carry]
    if len(indices) > 1:
        raise ValueError(
            f"Found multiple Carry definitions at {argument}={axes!r} in nnx.scan: "
            "there can be only one. Put its parts into a tuple."
        )
    for axis in axis_list:
        if axis is not Carry and any(x is Carry for x in jax.tree.leaves(axis)):
            raise ValueError(
                f"Carry must be a whole argument or output, found it nested in "
                f"{argument}={axes!r} of nnx.scan."
            )
    return indices[0] if indices else None


def _check_axes(prefix: Prefix, argument: str) -> None:
    """Refuses a value that is not an axis; it would count as ``None``."""
    for axis in prefix.values:
        if not (axis is None or axis is Carry or isinstance(axis, Integral)):
            raise ValueError(
                f"Invalid axis {axis!r} in `{argument}` of nnx.scan: an axis is an "
                "integer, None, or the class nnx.Carry itself."
            )


def _check_outputs(out_axes: Any) -> None:
    for axis in jax.tree.leaves(out_axes, is_leaf=lambda x: x is None):
        is_mapping = isinstance(axis, StateAxes)
        inner, mapping_text = (
            (axis.axes, "StateAxes with ") if is_mapping else ([axis], "")
        )
        for verb, name, wrong in ("broadcast", "None", None), ("carry", "Carry", Carry):
            if wrong in inner and axis is not Carry:
                raise ValueError(
                    f"Cannot {verb} output state. Got {mapping_text}{name} in "
                    f"out_axes={out_axes!r} of nnx.scan. Outputs are stacked: use an "
                    "axis, or carry the state."
                )


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
@overload  # a number at the start may be an array from the first round on
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
        cond_fun: Returns for a value whether to continue. Its writes are dropped.
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

    def last_of(loop: Loop) -> Leaves:
        def condition(carried: Leaves) -> Any:
            answer = loop.traced(carried).run(cond_fun, number=1)
            return answer.get_value() if isinstance(answer, Variable) else answer

        def once(carried: Leaves) -> Leaves:
            return loop.step(lambda call: call.run(body_fun), carried)[0]

        condition = debug_info.named_after(cond_fun, condition, has_own_names=True)
        body = debug_info.named_after(body_fun, once)
        return jax.lax.while_loop(condition, body, loop.initial)

    mode = config.propagation(graph, graph_updates)
    with _jax.hidden_frames:
        # The condition would not see the body's writes to a ref.
        functions = {"body_fun": body_fun, "cond_fun": cond_fun}
        return _run_loop(
            "while_loop", mode, last_of, functions, init_val, moves_refs=True
        )


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

    def last_of(loop: Loop) -> Leaves:
        def once(i: Any, carried: Leaves) -> Leaves:
            def at_i(body: Callable[..., Any]) -> Callable[[Any], Any]:
                return lambda value: body(i, value)

            return loop.step(lambda call: call.run(body_fun, 0, at_i), carried)[0]

        first = debug_info.parameters_of(body_fun).name_of(0)
        named = debug_info.named_after(body_fun, once, [first])
        # JAX can differentiate it in reverse if it knows the number of steps.
        return jax.lax.fori_loop(lower, upper, named, loop.initial, unroll=unroll)

    mode = config.propagation(graph, graph_updates)
    with _jax.hidden_frames:
        functions = {"body_fun": body_fun}
        return _run_loop("fori_loop", mode, last_of, functions, init_val, skipped=1)


_CARRY_SPEC = CarrySpec(
    argument=0,
    identity="The body must return the same reference and pytree structure as the "
    "initial value",
)


def _run_loop(
    name: str,
    mode: config.Propagation,
    last_of: Callable[[Loop], Leaves],
    functions: Mapping[str, Callable[..., Any]],
    init_val: Any,
    moves_refs: bool = False,
    skipped: int = 0,
) -> Any:
    """Runs a loop whose only argument is the carry; returns its last value."""
    spec = TransformSpec(
        name,
        mode,
        Prefix((Carry,), "init_val", name, mode, keywords=0),
        Prefix(Carry, "init_val", name, mode),
        keywords=(Keywords.STAY, Keywords.STAY),
        labels=Labels(named={0: "init_val"}, skipped=skipped, functions=[*functions]),
        signatures=_signatures,
        held=Carry,
    ).holding(*functions.values())
    body = functions["body_fun"]

    def traced(*groups: Leaves) -> Any:
        loop = Loop(spec, _CARRY_SPEC, groups, moves_refs)
        return loop.result(last_of(loop), ())

    run = functools.partial(programs.run, body, traced, name=name)
    return caller.Call(body, spec, (init_val,), {}).run(run)


_signatures = Interned()
