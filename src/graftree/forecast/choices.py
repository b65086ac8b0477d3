"""Answers from several forecasts: the largest size that fits, the best of some ways."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from graftree.core.text import descriptions
from graftree.forecast import pictures, progress
from graftree.forecast.compiled_steps import step
from graftree.forecast.forecasts import SUMMARY, Forecast, html_table, summary
from graftree.forecast.targets import Target


class Largest(NamedTuple):
    """The largest size that fits.

    Attributes:
        size: The size; 0 if not even the smallest fits.
        forecast: Its forecast, or that of the smallest size.
        totals: The bytes of a device at each size that was tried.

    Example:
        >>> target = nnx.forecast.target("cpu")
        >>> make = lambda n: (jax.ShapeDtypeStruct((n,), jnp.float32),)
        >>> nnx.forecast.largest(jnp.sin, make, memory=80, target=target).totals
        {1: 8, 8: 64, 16: 128, 12: 96, 10: 80, 11: 88}
    """

    size: int
    forecast: Forecast
    totals: Mapping[int, int]


def largest(
    function: Callable[..., Any],
    make_arguments: Callable[[int], Sequence[Any]],
    *,
    multiple_of: int = 1,
    at_most: int = 2**16,
    memory: float | None = None,
    target: Target | None = None,
) -> Largest:
    """Finds the largest batch, depth or length for which a step fits into a device.

    It compiles the step for some sizes: larger ones until one doesn't fit, and then by
    bisection and interpolation in turn. It takes for granted that a larger size needs
    more memory. Compilers that recompute values where memory gets
    scarce can make exceptions of some percent.

    Args:
        function: The step, as in `step`.
        make_arguments: Makes its positional arguments for a size.
        multiple_of: The size is a multiple of this, such as the number of devices that
            divide a batch.
        at_most: No size above this is tried.
        memory: Bytes that a device may hold; ``None`` for all that an accelerator has.
        target: As in `step`.

    Returns:
        A `Largest`: the size, its forecast, and what was tried.

    Raises:
        ValueError: If ``at_most`` is less than ``multiple_of``; if the target is a CPU
            and ``memory`` isn't set.

    Example:
        >>> target = nnx.forecast.target("cpu")
        >>> make = lambda n: (jax.ShapeDtypeStruct((n,), jnp.float32),)
        >>> nnx.forecast.largest(jnp.sin, make, memory=1000, target=target).size
        125
    """
    if not 1 <= multiple_of <= at_most:
        raise ValueError(
            f"nnx.forecast.largest: no size is a multiple of {multiple_of} and at most "
            f"{at_most}.\nAllow a larger size."
        )
    forecasts: dict[int, Forecast] = {}

    def total(count: int) -> int:
        size = count * multiple_of
        with progress.candidate(f"size {size}, compilation {len(forecasts) + 1}"):
            forecasts[size] = step(function, *make_arguments(size), target=target)
        return forecasts[size].memory.total

    totals = {1: total(1)}
    limit = forecasts[multiple_of].memory.limit if memory is None else memory
    if limit is None:
        raise ValueError(
            "nnx.forecast.largest: the memory of a CPU is unknown.\n"
            "Pass memory=..., in bytes."
        )
    low, high = (1, at_most // multiple_of + 1) if totals[1] <= limit else (0, 1)
    while high - low > 1:
        count = _next(low, high, totals, limit)
        totals[count] = total(count)
        low, high = (count, high) if totals[count] <= limit else (low, count)
    sizes = {size: forecast.memory.total for size, forecast in forecasts.items()}
    return Largest(low * multiple_of, forecasts[max(low, 1) * multiple_of], sizes)


def _next(low: int, high: int, totals: Mapping[int, int], limit: float) -> int:
    """Chooses a count between one that fits and one that doesn't, or may not."""
    if high not in totals:
        guess = int(low * min(max(limit / totals[low], 2), 8))
    elif len(totals) % 2:  # a curve may keep a line on one side of the limit
        guess = (low + high) // 2
    else:
        share = (limit - totals[low]) / (totals[high] - totals[low])
        guess = math.floor(low + share * (high - low))
    return min(max(guess, low + 1), high - 1)


class Comparison:
    """Forecasts side by side, the best first; prints as a table.

    Args:
        forecasts: By a name of each.

    Attributes:
        forecasts: Those that fit come first, by their estimates; then by their memory.

    Example:
        >>> target = nnx.forecast.target("cpu")
        >>> x = jax.ShapeDtypeStruct((128, 128), jnp.float32)
        >>> functions = {"sin": jnp.sin, "dot": lambda x: x @ x}
        >>> nnx.forecast.compare({
        ...     name: nnx.forecast.step(function, x, target=target)
        ...     for name, function in functions.items()})
             memory   fits     estimate  because of  at least  flop     bytes    sent
        sin  128 KiB  unknown  unknown   unknown     unknown   0        131.1 k  0
        dot  128 KiB  unknown  unknown   unknown     unknown   4.194 M  131.1 k  0
    """

    def __init__(self, forecasts: Mapping[str, Forecast]) -> None:
        self.forecasts = dict(sorted(forecasts.items(), key=lambda x: _rank(x[1])))

    def _rows(self) -> list[tuple[str, ...]]:
        rows = [(name, *summary(x)) for name, x in self.forecasts.items()]
        return [("", *SUMMARY), *rows]

    def __repr__(self) -> str:
        return "\n".join(descriptions.aligned(self._rows()))

    def _repr_html_(self) -> str:
        return html_table(self._rows())

    def draw(self, path: Any = None) -> Any:
        """Draws the memory of all and their modules, as `Forecast.draw` does."""
        return pictures.draw(self.forecasts, path)


def compare(
    forecasts: Mapping[str, Forecast | Callable[[], Forecast]],
) -> Comparison:
    """Puts several forecasts side by side: meshes, policies, targets.

    Args:
        forecasts: By a name of each; also functions that make them, which are called in
            turn. Long compilations then say which of how many they are.

    Returns:
        A `Comparison`, which prints as a table, the best first: what fits before what
        doesn't, then by the estimated time, then by memory.

    Raises:
        ValueError: If there is none.

    Example:
        >>> def make(name):
        ...     mesh = nnx.forecast.target("cpu:4").mesh({"data": 4})
        ...     spec = {"divided": jax.P("data"), "whole": jax.P()}[name]
        ...     sharding = jax.NamedSharding(mesh, spec)
        ...     return jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=sharding)
        >>> comparison = nnx.forecast.compare({
        ...     "whole": lambda: nnx.forecast.step(lambda x: x + 1, make("whole")),
        ...     "divided": lambda: nnx.forecast.step(lambda x: x + 1, make("divided"))})
        >>> [*comparison.forecasts]
        ['divided', 'whole']
    """
    if not forecasts:
        raise ValueError("nnx.forecast.compare: there are no forecasts.")
    results: dict[str, Forecast] = {}
    for number, (name, forecast) in enumerate(forecasts.items(), 1):
        if not isinstance(forecast, Forecast):
            with progress.candidate(f"{number} of {len(forecasts)}, {name}"):
                forecast = forecast()
        results[name] = forecast
    return Comparison(results)


def _rank(forecast: Forecast) -> tuple[bool, float, int]:
    estimate = math.inf if forecast.estimate is None else forecast.estimate
    return forecast.memory.fits is False, estimate, forecast.memory.total
