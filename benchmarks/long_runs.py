"""Does it stay as it is: with many calls, and with many Variables?"""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks import calls, perceptrons
from benchmarks.gauges import Operation
from benchmarks.groups import Made

LAYERS = 4


def _slowest_calls(call: Operation, count: int) -> Callable[[], float]:
    """How much longer than the median the slowest in a thousand warm calls take."""

    def operation():
        for _ in range(10):
            jax.block_until_ready(call())
        seconds = np.empty(count)
        for i in range(count):
            start = time.perf_counter()
            jax.block_until_ready(call())
            seconds[i] = time.perf_counter() - start
        return np.quantile(seconds, 0.999) / np.median(seconds)

    return operation


def _tracing(lower: Callable[[], Any], variables: int) -> Callable[[], float]:
    """Seconds of tracing and lowering, per Variable."""

    def operation():
        start = time.perf_counter()
        lower()
        return (time.perf_counter() - start) / variables

    return operation


def _raw_lower(variables: int) -> Callable[[], Any]:
    """Traces and lowers an MLP with so many arrays, each time again."""
    leaves, treedef = jax.tree.flatten(perceptrons.parameters(variables // 2))
    x = perceptrons.batch()["x"]

    def lower():
        def function(leaves, x):
            return perceptrons.apply(jax.tree.unflatten(treedef, leaves), x)

        return jax.jit(function).lower(leaves, x)

    return lower


def _nnx_lower(nnx: Any, variables: int, **mode: bool) -> Callable[[], Any]:
    """The same for an object with so many Variables."""
    model, x = perceptrons.nnx_new(nnx, variables // 2), perceptrons.batch()["x"]
    return lambda: nnx.jit(lambda model, x: model(x), **mode).lower(model, x)


SLOWEST = Made(
    lambda count: _slowest_calls(calls.raw(LAYERS), count),
    lambda nnx, count, **mode: _slowest_calls(calls.nnx(nnx, LAYERS, **mode), count),
)
TRACING = Made(
    lambda count: _tracing(_raw_lower(count), count),
    lambda nnx, count, **mode: _tracing(_nnx_lower(nnx, count, **mode), count),
)
