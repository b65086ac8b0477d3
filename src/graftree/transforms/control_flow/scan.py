"""``scan``: a function applied step by step along an axis of objects and arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

import jax

from graftree import _jax, config
from graftree.core.graph.graphdefs import Interned
from graftree.transforms.control_flow.loop_bodies import Carry, Loop, Place, Step
from graftree.transforms.crossing import debug_info, decorators, programs
from graftree.transforms.crossing.decorators import MISSING
from graftree.transforms.crossing.packing import Values
from graftree.transforms.crossing.plans import RepeatedCalls
from graftree.transforms.crossing.prefixes import Prefix, StateAxes
from graftree.transforms.crossing.rows import Keywords, Row
from graftree.transforms.crossing.signatures import Labels

_NO_METADATA: Mapping[str, Any] = {}


@decorators.keeps_type
def scan(
    f: Any = MISSING,
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
    scanned, and each step gets a slice of it; or it is the same for all steps. What a
    step writes to a scanned Variable comes back on the same axis. What it writes to a
    Variable that is the same for all steps is kept without graph updates, and dropped
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
        place = _find_place(inputs, outputs)
        names = {} if place.argument is None else {place.argument: "carry"}
        row = Row(
            "scan",
            mode,
            Prefix(inputs, "in_axes", "scan", mode, keywords=0),
            Prefix(outputs, "out_axes", "scan", mode),
            keywords=(Keywords.REFUSED, Keywords.BECOME_POSITIONAL),
            labels=Labels(named=names),
            axis_metadata=transform_metadata,
            signatures=Interned(),
        )
        _check_axes(row.inputs, "in_axes")
        _check_axes(row.outputs, "out_axes")
        return _scanned(function, row, place, options)

    return decorators.decorate(f, "scan", make)


def _scanned(
    f: Callable[..., Any], row: Row, place: Place, options: dict[str, Any]
) -> Callable[..., Any]:
    def traced(*groups: Values) -> Any:
        loop = Loop(row, place, groups)

        def steps(step: Step) -> Any:
            def body(carried: Values, scanned: Values) -> Any:
                return step(f, carried, scanned)

            named = debug_info.named_after(f, body)
            return jax.lax.scan(named, loop.initial, loop.scanned, **options)

        return loop.run(steps)

    run = functools.partial(programs.run, f, traced, name="scan")
    calls = RepeatedCalls(f, row)

    @decorators.wraps(f)
    def scanned(*args: Any, **kwargs: Any) -> Any:
        count = len(args) + len(kwargs)
        if row.inputs.tree[0] is Carry and count != 1:
            raise ValueError(
                "When in_axes=Carry, the function must take exactly one argument, got "
                f"{count} arguments in nnx.scan. Give in_axes as a tuple with one "
                "entry per argument."
            )
        with _jax.hidden_frames:
            return calls.run(run, args, kwargs)

    return scanned


def _find_place(in_axes: Any, out_axes: Any) -> Place:
    """Where the carry is; checks the axes."""
    argument = _find_carry(in_axes, "in_axes")
    output = _find_carry(out_axes, "out_axes")
    if (argument is None) != (output is None):
        raise ValueError(
            "If one of in_axes or out_axes has Carry, the other must also have "
            f"Carry. Got in_axes={in_axes!r}, out_axes={out_axes!r} in nnx.scan."
        )
    _check_outputs(out_axes)
    return Place(
        argument,
        None if out_axes is Carry else output,
        takes_new_variables=True,
        may_settle=True,
        identity="Carry references must be the same between iterations",
    )


def _find_carry(axes: Any, argument: str) -> int | None:
    """The place of `Carry` in a tuple of axes; 0 if it is all of them."""
    if axes is Carry:
        return 0
    entries = axes if isinstance(axes, tuple) else (axes,)
    found = [i for i, axis in enumerate(entries) if axis is Carry]
    if len(found) > 1:
        raise ValueError(
            f"Found multiple Carry definitions at {argument}={axes!r} in nnx.scan: "
            "there is one carry. Put its parts into a tuple."
        )
    for axis in entries:
        inner = jax.tree.leaves(axis, is_leaf=lambda x: isinstance(x, StateAxes))
        if axis is not Carry and any(x is Carry for x in inner):
            raise ValueError(
                f"Carry must be a whole argument or output, found it nested in "
                f"{argument}={axes!r} of nnx.scan."
            )
    return found[0] if found else None


def _check_axes(prefix: Prefix, argument: str) -> None:
    """Refuses what is not an axis; it would count as ``None``."""
    for axis in prefix.values:
        if not (axis is None or axis is Carry or isinstance(axis, Integral)):
            raise ValueError(
                f"Invalid axis {axis!r} in `{argument}` of nnx.scan: an axis is an "
                "integer, None, or the class nnx.Carry itself."
            )


def _check_outputs(out_axes: Any) -> None:
    leaves = jax.tree.leaves(
        out_axes, is_leaf=lambda x: x is None or isinstance(x, StateAxes)
    )
    for axis in leaves:
        if axis is None:
            raise ValueError(
                "Cannot broadcast output state: an entry of out_axes is None in "
                f"nnx.scan, got out_axes={out_axes!r}. Outputs are stacked; use an "
                "axis, or carry the state."
            )
        for verb, wrong in (("broadcast", None), ("carry", Carry)):
            if isinstance(axis, StateAxes) and wrong in axis.axes:
                name = "None" if wrong is None else "Carry"
                raise ValueError(
                    f"Cannot {verb} output state. Got StateAxes with {name} in "
                    f"out_axes of nnx.scan: {axis!r}. Use an axis."
                )
