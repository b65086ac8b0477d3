"""Pictures of forecasts: memory against its limit, modules under the roofline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graftree.forecast.forecasts import Forecast

_GIB = 2**30
_PARTS = ("parameters", "optimizer", "others", "constants", "outputs", "temporaries")


def draw(forecasts: Mapping[str, Forecast], path: Any = None) -> Any:
    """Draws forecasts beside each other, and saves the picture if there is a path."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    memory, roofline = figure.subplots(1, 2, width_ratios=(1, 1))
    _draw_memory(memory, forecasts)
    _draw_roofline(roofline, forecasts)
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


def _draw_memory(axes: Any, forecasts: Mapping[str, Forecast]) -> None:
    """Stacks what a device holds, and marks how much there is."""
    bottoms = [0.0] * len(forecasts)
    for part in _PARTS:
        heights = [getattr(x.memory, part) / _GIB for x in forecasts.values()]
        axes.bar([*forecasts], heights, bottom=bottoms, label=part, width=0.6)
        bottoms = [a + b for a, b in zip(bottoms, heights, strict=True)]
    for i, forecast in enumerate(forecasts.values()):
        if forecast.memory.limit is not None:
            limit = forecast.memory.limit / _GIB
            axes.hlines(limit, i - 0.4, i + 0.4, colors="black", linestyles="dashed")
    axes.set(title="memory of a device", ylabel="GiB")
    axes.tick_params(axis="x", labelrotation=15 if len(forecasts) > 1 else 0)
    axes.legend(fontsize="small")


def _draw_roofline(axes: Any, forecasts: Mapping[str, Forecast]) -> None:
    """Draws each module where its operations per byte put it, under the peak."""
    axes.set(title="roofline", xlabel="flop per byte", ylabel="flop/s at most")
    axes.set(xscale="log", yscale="log")
    for name, forecast in forecasts.items():
        accelerator = forecast.target.accelerator
        if accelerator is None:
            continue
        works = [work for _, work in forecast.by_module(3) if work.flops and work.bytes]
        intensities = [work.flops / work.bytes for work in works]
        ridge = accelerator.flops / accelerator.memory_bandwidth
        xs = sorted([1.0, ridge, max([10 * ridge, *intensities])])
        peak, bandwidth = accelerator.flops, accelerator.memory_bandwidth
        (line,) = axes.plot(xs, [min(peak, x * bandwidth) for x in xs])
        total = max([work.flops for work in works], default=1)
        axes.scatter(
            intensities,
            [min(peak, x * bandwidth) for x in intensities],
            s=[200 * work.flops / total for work in works],
            alpha=0.4,
            color=line.get_color(),
            label=name,
        )
    if axes.collections:
        axes.legend(fontsize="small", loc="lower right")
