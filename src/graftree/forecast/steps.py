"""The forecast of a step: trace, compile for the target, read the program."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from typing import Any

from graftree.forecast import arguments, compilation, sums
from graftree.forecast.arguments import Placed
from graftree.forecast.compilation import Compiled
from graftree.forecast.reports import Forecast, Memory
from graftree.forecast.targets import Target
from graftree.sharding.placement import PlacedArray
from graftree.transforms.compiled import jit


def step(
    function: Callable[..., Any],
    *args: Any,
    target: Target | None = None,
    **kwargs: Any,
) -> Forecast:
    """Compiles a step for a target, and says what it costs there. Nothing is run.

    Args:
        function: The step: an ``nnx.jit`` or ``jax.jit`` function, or any other, which
            is compiled with `nnx.jit`.
        *args: What it takes, abstract or not. Arrays with a sharding on a mesh of a
            target, as `nnx.get_abstract_model` makes them, are compiled for that;
            arrays that are on no device in particular are whole on each of its devices,
            as JAX would have them.
        target: What to compile for, if it has one device; ``None`` if the shardings of
            the arguments say it.
        **kwargs: Keyword arguments of the function.

    Returns:
        A `Forecast`, which prints as a table. Where the compiler refuses the program
        because it needs more memory than there is, as those of TPUs do, it has the
        memory alone.

    Raises:
        ValueError: If the arguments are on several targets or meshes, or on real
            devices together with those; or if nothing says which target is meant.
        Exception: What JAX or the compiler raises for a program that can't be compiled
            for the target; a note names the module.

    Example:
        >>> mesh = nnx.forecast.target("cpu:4").mesh({"data": 4})
        >>> model = nnx.merge(*nnx.get_abstract_model(
        ...     lambda: nnx.Linear(128, 256, use_bias=False, rngs=nnx.Rngs(0)), mesh))
        >>> x = jax.ShapeDtypeStruct(
        ...     (32, 128), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P("data")))
        >>> forecast = nnx.forecast.step(lambda model, x: model(x), model, x)
        >>> forecast.memory.parameters, forecast.flops == 2 * 8 * 128 * 256
        (131072, True)
    """
    placed = arguments.place(function, args, kwargs, target)
    if not hasattr(function, "lower"):
        function = jit.jit(function)
    start = time.perf_counter()
    traced = function.trace(*placed.args, **placed.kwargs)  # type: ignore[attr-defined]
    traced_at = time.perf_counter()
    compiled = compilation.compile(traced, placed.target)
    seconds = traced_at - start, time.perf_counter() - traced_at
    costs = None
    if compiled.program is not None:
        costs = sums.costs_of(compiled.program, placed.target, placed.mesh)
    return Forecast(
        placed.target,
        {} if placed.mesh is None else dict(placed.mesh.shape),
        _memory(placed, compiled),
        costs,
        _undivided(placed),
        seconds,
    )


def _memory(placed: Placed, compiled: Compiled) -> Memory:
    """Adds up what a device holds of the arguments, and what the compiler adds."""
    sizes = collections.Counter[str]()
    for row, role in placed.arrays:
        sizes[role] += row.local_bytes
    temporaries = compiled.temporaries
    if compiled.total is not None:
        temporaries = max(compiled.total - sizes.total(), 0)
    accelerator = placed.target.accelerator
    return Memory(
        sizes[arguments.PARAMETERS],
        sizes[arguments.OPTIMIZER],
        sizes[arguments.OTHERS],
        compiled.outputs,
        temporaries,
        None if accelerator is None else accelerator.memory,
    )


def _undivided(placed: Placed) -> list[PlacedArray]:
    """Lists the arrays that each device holds whole, largest first."""
    if placed.mesh is None or placed.mesh.size == 1:
        return []
    rows = [row for row, _ in placed.arrays]
    whole = [row for row in rows if row.local_shape == row.shape and row.num_bytes > 0]
    return sorted(whole, key=lambda row: -row.num_bytes)
