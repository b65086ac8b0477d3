"""What it costs that the path of the running module is known, beside doing without."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import calls, gpts, perceptrons
from benchmarks.gauges import Operation
from graftree.core.objects import methods

LAYERS = 4
WIDTH = 8


def trace(nnx: Any, depth: int, named: bool) -> Operation:
    """Traces and lowers the train step of a GPT, with operations named or not."""
    make = gpts.nnx(nnx, depth)

    def operation():
        with nnx.config.temp_flip_flag("graftree_named_scopes", named):
            return make().lower()

    return operation


def warm_call(nnx: Any, named: bool) -> Operation:
    """Calls a compiled function that was traced with operations named or not."""
    call = calls.nnx(nnx, LAYERS)
    with nnx.config.temp_flip_flag("graftree_named_scopes", named):
        call()
    return call


def raw_eager() -> Operation:
    """A linear layer by hand."""
    (layer,) = perceptrons.parameters(1, WIDTH)
    x = perceptrons.batch(WIDTH)["x"]
    return lambda: jnp.dot(x, layer["kernel"]) + layer["bias"][None]


def eager(nnx: Any, wrapped: bool) -> Operation:
    """Calls a linear layer, or its method as it was written."""
    layer = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    x: jax.Array = perceptrons.batch(WIDTH)["x"]
    if wrapped:
        return lambda: layer(x)
    method: Callable[..., Any] = methods.function_of(nnx.Linear.__call__)
    return lambda: method(layer, x)
