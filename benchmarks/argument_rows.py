"""Calls of ``nnx.jit`` with what is no object: States, Variables, tuples of objects."""

from typing import Any

import jax
import optax

from benchmarks import perceptrons, plain_jit, rows
from benchmarks.gauges import Operation
from benchmarks.rows import Group


def groups(quick: bool = False) -> list[Group]:
    """All measurements; if ``quick``, in the default mode."""
    found = []
    for depth in (4, 50):
        for name, raw, nnx, target in (
            ("forward call with a State", plain_jit.raw_call, state_call, "1.30 raw"),
            ("step from State to State", raw_step, state_step, ""),
            ("forward call with (model, optimizer)", raw_pair, pair_call, "1.30 raw"),
        ):
            title = f"{name}, {depth} layers"
            found.append(
                rows.compared(
                    title, rows.MICROSECONDS, "dicts", raw, nnx, depth, target=target
                )
            )
        splits = rows.compared(
            f"split((model, optimizer)), {depth} layers",
            *(rows.HOST_MICROSECONDS, "jax.tree.flatten", raw_split, split, depth),
            target="0.17 Flax",
        )
        found.append(rows.in_default_mode(splits))
    return [*map(rows.in_default_mode, found)] if quick else found


def state_call(nnx: Any, depth: int, **mode: bool) -> Operation:
    """The MLP, merged from a State in the function."""
    graphdef, state = nnx.split(perceptrons.nnx_model(nnx, depth))
    x = perceptrons.batch()["x"]
    function = nnx.jit(lambda state, x: nnx.merge(graphdef, state)(x), **mode)
    return lambda: function(state, x)


def raw_step(depth: int) -> Operation:
    """New parameters from those of the call before."""
    return _in_a_loop(jax.jit(_decayed), perceptrons.parameters(depth))


def state_step(nnx: Any, depth: int, **mode: bool) -> Operation:
    """The same, from State to State."""
    state = nnx.state(perceptrons.nnx_model(nnx, depth))
    return _in_a_loop(nnx.jit(_decayed, **mode), state)


def _decayed(tree: Any) -> Any:
    return jax.tree.map(lambda x: x * 0.999, tree)


def _in_a_loop(step: Any, start: Any) -> Operation:
    latest = [start]

    def operation():
        latest[0] = step(latest[0])
        return jax.tree.leaves(latest[0])

    return operation


def raw_pair(depth: int) -> Operation:
    """The MLP beside moments that it doesn't use."""
    params, x = perceptrons.parameters(depth), perceptrons.batch()["x"]
    moments = optax.adam(1e-3).init(params)
    function = jax.jit(lambda pair, x: perceptrons.apply(pair[0], x))
    return lambda: function((params, moments), x)


def pair_call(nnx: Any, depth: int, **mode: bool) -> Operation:
    """The model of a tuple that is one argument."""
    pair, x = _pair(nnx, depth), perceptrons.batch()["x"]
    function = nnx.jit(lambda pair, x: pair[0](x), **mode)
    return lambda: function(pair, x)


def raw_split(depth: int) -> Operation:
    """The leaves of the parameters and of their moments."""
    params = perceptrons.parameters(depth)
    pair = params, optax.adam(1e-3).init(params)
    return lambda: jax.tree.flatten(pair)


def split(nnx: Any, depth: int) -> Operation:
    """The functional form of two objects at once."""
    pair = _pair(nnx, depth)
    return lambda: nnx.split(pair)


def _pair(nnx: Any, depth: int) -> Any:
    model = perceptrons.nnx_model(nnx, depth)
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
