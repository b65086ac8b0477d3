"""What it costs that the path of the running module is known, beside doing without."""

import types
from functools import partial
from typing import Any

import jax.numpy as jnp

import graftree as nnx
from benchmarks import calls, gpts, perceptrons
from benchmarks.gauges import Operation
from benchmarks.groups import MICROSECONDS, MILLISECONDS, Group, Row
from benchmarks.libraries import GRAFTREE, RAW

LAYERS = 4


def groups_of(depth: int) -> list[Group]:
    """Each with a row of raw JAX, and with paths off and on."""

    def group(title, quantity, raw, make):
        rows = [
            Row(GRAFTREE, f"paths {word}", partial(make, is_on))
            for word, is_on in (("off", False), ("on", True))
        ]
        return Group(f"paths of modules: {title}", quantity, (raw, *rows))

    gpt = Row(RAW, "functions of dicts", lambda: gpts.lowering(gpts.raw(depth)))
    call = Row(RAW, "flat list", partial(calls.raw, LAYERS))
    eager = Row(RAW, "by hand", _raw_eager)
    title = f"trace the train step of a GPT, {depth} layers"
    return [
        group(title, MILLISECONDS, gpt, partial(_trace, depth)),
        group("a warm call", MICROSECONDS, call, _warm_call),
        group("Linear, eager", MICROSECONDS, eager, _eager),
    ]


def _named(named: bool) -> Any:
    return nnx.config.temp_flip_flag("graftree_named_scopes", named)


def _trace(depth: int, named: bool) -> Operation:
    make = gpts.nnx(nnx, depth)

    def operation():
        with _named(named):
            return make().lower()

    return operation


def _warm_call(named: bool) -> Operation:
    """A compiled function that was traced with operations named or not."""
    call = calls.nnx(nnx, LAYERS)
    with _named(named):
        call()
    return call


def _raw_eager() -> Operation:
    (layer,), x = perceptrons.parameters(1), perceptrons.batch()["x"]
    return lambda: jnp.dot(x, layer["kernel"]) + layer["bias"][None]


def _eager(wrapped: bool) -> Operation:
    """A linear layer, or its method as it was written."""
    (layer,), x = perceptrons.nnx_model(nnx, 1).layers, perceptrons.batch()["x"]
    if wrapped:
        return lambda: layer(x)
    known = nnx.Linear.__call__  # it shows the attributes of the function in it
    call = types.FunctionType(
        *(known.__code__, known.__globals__, known.__name__),
        *(known.__defaults__, known.__closure__),
    )
    call.__kwdefaults__ = known.__kwdefaults__
    return partial(call, layer, x)
