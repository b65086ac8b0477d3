"""The rows of the language model: speed, tracing, and what XLA plans for a step.

Layouts of eight devices are measured where there are eight:
``XLA_FLAGS=--xla_force_host_platform_device_count=8``.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax

from benchmarks import gauges, groups, language_models, language_models_flax, libraries
from benchmarks.groups import Group, Row
from benchmarks.language_models import SMALL, Setting
from benchmarks.libraries import FLAX, GRAFTREE, RAW
from examples.lm.model import Config

# So small that tracing is all there is to do.
DEEP = Config(layers=12, width=32, heads=4, kv_heads=2, hidden=64)
LAYOUTS = {
    "one device": (),
    "fsdp=8": (("fsdp", 8),),
    "fsdp=4, tensor=2": (("fsdp", 4), ("tensor", 2)),
}


def all_groups(quick: bool = False) -> list[Group]:
    """All measurements; if ``quick``, of unrolled blocks alone."""
    devices = jax.device_count()
    found = []
    for layout, mesh in LAYOUTS.items():
        for stacked in (False,) if quick else (False, True):
            if mesh and devices != 8:
                continue
            name = f"language model, {layout}, {'a Stack' if stacked else 'unrolled'}"
            found += _groups_of(name, mesh, stacked)
    return found


def _groups_of(name: str, mesh: Any, stacked: bool) -> list[Group]:
    small = Setting(dataclasses.replace(SMALL, stacked=stacked), mesh)
    deep = Setting(dataclasses.replace(DEEP, stacked=stacked), mesh, batch=8, length=16)
    # Devices that share the cores of one machine are now faster, now slower.
    speed = groups.per_second(small.num_tokens, "tokens", longer=4)
    return [
        Group(f"{name}: {title}", quantity, rows_of(operation_of, setting), target)
        for title, quantity, operation_of, setting, target in (
            ("speed", speed, new_step, small, "0.98 raw"),
            (
                "trace and lower 12 layers",
                *(groups.MILLISECONDS, lowerings, deep, "1.10 raw"),
            ),
            ("compile", groups.OWN_MILLISECONDS, compilations, small, ""),
            ("temporaries", groups.KILOBYTES, temporaries, small, "1.01 raw"),
            ("lines of HLO", groups.LINES, lines, small, ""),
        )
    ]


def rows_of(operation_of: Callable[..., Any], setting: Setting) -> tuple[Row, ...]:
    """Raw JAX, Graftree and Flax NNX, as far as installed."""
    return tuple(
        Row(name, "", functools.partial(operation_of, name, setting))
        for name in (RAW, *libraries.installed(GRAFTREE, FLAX))
    )


def new_step(library: str, setting: Setting) -> Any:
    """The train step of raw JAX, Graftree or Flax NNX."""
    if library == RAW:
        return language_models.raw(setting)
    if library == GRAFTREE:
        return language_models.ours(setting)
    return language_models_flax.step(libraries.installed(FLAX)[FLAX], setting)


def lowerings(library: str, setting: Setting) -> Callable[[], Any]:
    """Tracing and lowering, each time without any of JAX's caches.

    So it is what the first call of a program takes: the functions of JAX itself are
    traced again as well, for all alike.
    """
    step = new_step(library, setting)

    def operation():
        jax.clear_caches()
        return step.lower()

    return gauges.at_many_depths(operation)


def compilations(library: str, setting: Setting) -> Callable[[], Any]:
    """Seconds to compile what was lowered before."""
    step = new_step(library, setting)

    def operation():
        jax.clear_caches()
        lowered = step.lower()
        start = time.perf_counter()
        lowered.compile()
        return time.perf_counter() - start

    return operation


@functools.cache
def _compiled(library: str, setting: Setting) -> Any:
    return new_step(library, setting).lower().compile()


def temporaries(library: str, setting: Setting) -> Callable[[], int]:
    """Bytes that a step needs besides its arguments and results."""
    compiled = _compiled(library, setting)
    return lambda: compiled.memory_analysis().temp_size_in_bytes


def lines(library: str, setting: Setting) -> Callable[[], int]:
    """Instructions of the compiled program."""
    compiled = _compiled(library, setting)
    return lambda: compiled.as_text().count(" = ")
