"""Many models, each new, through one jitted function: does a call get slower or larger?

What a library remembers of a model must go when the model goes. The models are two
Variables around the same two arrays; one is made, called and dropped after the other.

A course has four figures: *first* and *last*, the median seconds per call in the first
and last tenth; *objects* of Python and bytes of *resident* memory that stayed, per
model, after the first tenth (zero bytes where the system does not tell).
"""

import functools
import gc
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

from benchmarks import perceptrons
from benchmarks.groups import Made


@functools.cache
def raw(count: int) -> dict[str, float]:
    """Fresh lists of arrays, through ``jax.jit``."""
    function = jax.jit(lambda leaves, x: x @ leaves[0] + leaves[1][None])
    return _course(lambda kernel, bias: [kernel, bias], function, count)


@functools.cache
def nnx(nnx: Any, count: int, **mode: bool) -> dict[str, float]:
    """Fresh objects of Graftree or Flax NNX, in one of the three modes."""

    class Model(nnx.Module):
        def __init__(self, kernel, bias):
            self.kernel = nnx.Param(kernel)
            self.bias = nnx.Param(bias)

        def __call__(self, x):
            return x @ self.kernel[...] + self.bias[...][None]

    return _course(Model, nnx.jit(lambda model, x: model(x), **mode), count)


def figure(name: str) -> Made:
    """What gives one figure of courses."""
    return Made(
        lambda count: lambda: raw(count)[name],
        lambda library, count, **mode: lambda: nnx(library, count, **mode)[name],
    )


def _course(make: Callable[..., Any], function: Any, count: int) -> dict[str, float]:
    (values,) = perceptrons.parameters(1)
    x = perceptrons.batch()["x"]

    def calls(count):
        seconds = []
        for _ in range(count):
            model = make(**values)
            start = time.perf_counter()
            function(model, x)
            seconds.append(time.perf_counter() - start)
        return seconds

    jax.block_until_ready(function(make(**values), x))
    tenth = count // 10
    first = calls(tenth)
    objects, resident = _objects(), _resident_bytes()
    last = calls(count - tenth)[-tenth:]
    return {
        "first": statistics.median(first),
        "last": statistics.median(last),
        "objects": (_objects() - objects) / (count - tenth),
        "resident": (_resident_bytes() - resident) / (count - tenth),
    }


def _objects() -> int:
    gc.collect()
    return len(gc.get_objects())


def _resident_bytes() -> int:
    pages = pathlib.Path("/proc/self/statm")
    if not pages.exists():
        return 0
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
