"""Control flow outside of a trace, where a library decides what to trace again."""

from typing import Any

import jax

from benchmarks import perceptrons
from benchmarks.gauges import Operation


def raw(depth: int, _: bool) -> Operation:
    """``jax.lax.cond`` over a pytree, as an operand."""
    params, x = perceptrons.parameters(depth), perceptrons.batch()["x"]

    def skip(_, x):
        return x

    return lambda: jax.lax.cond(True, perceptrons.apply, skip, params, x)


def nnx(nnx: Any, depth: int, captured: bool, **mode: bool) -> Operation:
    """``nnx.cond`` over an object, as an operand or captured by the branches."""
    model, x = perceptrons.nnx_model(nnx, depth), perceptrons.batch()["x"]
    if captured:
        return lambda: nnx.cond(True, lambda x: model(x), lambda x: x, x, **mode)

    def apply(model, x):
        return model(x)

    def skip(_, x):
        return x

    return lambda: nnx.cond(True, apply, skip, model, x, **mode)
