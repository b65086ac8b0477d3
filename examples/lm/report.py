"""What came of it: lines for the terminal, pictures for the output folder."""

import math
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import axes, figure

from examples import pictures
from examples.lm.curves import Record
from examples.pictures import COLORS

SMOOTHED = 20
LEAST_GAP = 1e-8


def sizes(record: Record) -> str:
    """Returns the lines that say what runs where, and what it needs."""
    return (
        f"layout {record.label}, on {record.devices}\n"
        f"{record.parameters:,} parameters; on each device model and optimizer are "
        f"{record.state_bytes:,} of {record.total_bytes:,} bytes, and a step needs "
        f"{record.step_bytes:,} more\n"
        f"collectives of a step: {in_words(record.collectives)}"
    )


def draw_curve(record: Record, path: pathlib.Path) -> None:
    """Writes a picture of the losses of a run to ``path``."""
    picture = figure.Figure(figsize=(7, 4), layout="constrained")
    plot = picture.subplots()
    training = record.curve.training
    plot.plot(range(1, len(training) + 1), training, color=COLORS[0], alpha=0.25)
    plot.plot(*_smoothed(training), color=COLORS[0], label="training")
    if record.curve.held_out:
        steps, losses = zip(*record.curve.held_out, strict=True)
        plot.plot(steps, losses, "o-", color=COLORS[1], label="held out")
    plot.set_title(f"loss, {record.label}")
    _finish(plot)
    plot.legend()
    pictures.write(picture, path)


def draw_comparison(records: Mapping[str, Record], path: pathlib.Path) -> None:
    """Writes a picture of the curves of runs over each other to ``path``.

    Below are the largest differences so far of their losses from those of the first.
    """
    picture = figure.Figure(figsize=(8, 6.5), layout="constrained")
    above, below = picture.subplots(2, 1, height_ratios=(3, 2), sharex=True)
    first = next(iter(records.values())).curve.training
    for number, (label, record) in enumerate(records.items()):
        color = COLORS[number % len(COLORS)]
        # Thinner and thinner, so that curves that agree all show.
        width = 1.0 + 1.2 * (len(records) - 1 - number)
        losses = record.curve.training
        above.plot(*_smoothed(losses), color=color, lw=width, label=label)
        if number:
            gaps = np.maximum.accumulate(np.abs(differences(first, losses)))
            # No difference has no place on this scale, so the least one stands for it.
            gaps = np.maximum(gaps, LEAST_GAP)
            below.plot(range(1, len(gaps) + 1), gaps, color=color, lw=width)
    above.set_title("training loss of the layouts, over each other")
    above.legend(fontsize=8)
    _finish(above)
    below.set_yscale("log")
    title = f"largest difference so far from {next(iter(records))}"
    below.set_title(title, fontsize=10)
    _finish(below)
    above.set_xlabel("")
    pictures.write(picture, path, dpi=100)


def differences(first: Sequence[float], other: Sequence[float]) -> np.ndarray:
    """Returns the differences of losses, for the steps that both have."""
    count = min(len(first), len(other))
    return np.subtract(other[:count], first[:count])


def comparison(records: Mapping[str, Record]) -> list[str]:
    """Returns the lines of a table, in Markdown, with a row for each run."""
    first = next(iter(records.values())).curve.training
    rows = [
        (
            *("layout", "steps", "loss", "largest difference", "held out, bits/byte"),
            *("state, B/device", "step, B/device", "tokens/s", "collectives of a step"),
        )
    ]
    for label, record in records.items():
        curve = record.curve
        held_out = curve.held_out[-1][1] if curve.held_out else math.nan
        rows.append(
            (
                label,
                f"{len(curve.training)}",
                f"{curve.training[-1]:.4f}",
                f"{np.abs(differences(first, curve.training)).max():.1e}",
                f"{held_out / math.log(2):.3f}",
                f"{record.state_bytes:,}",
                f"{record.step_bytes:,}",
                f"{record.tokens_per_second:,.0f}",
                in_words(record.collectives),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(map(str.ljust, row, widths)).rstrip() + " |" for row in rows
    ]
    return [lines[0], "|" + "|".join(["---"] * len(widths)) + "|", *lines[1:]]


def in_words(collectives: Mapping[str, Sequence[int]]) -> str:
    """Returns how often devices exchange what kind, and how many bytes."""
    kinds = [
        f"{count} {kind} ({num_bytes:,} B)"
        for kind, (count, num_bytes) in collectives.items()
    ]
    return ", ".join(kinds) or "none"


def _smoothed(losses: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """The means of so many losses in a row, and the steps in the middle of them."""
    width = min(SMOOTHED, max(1, len(losses) // 40))
    means = np.convolve(losses, np.full(width, 1 / width), "valid")
    return np.arange(len(means)) + (width + 1) / 2, means


def _finish(plot: axes.Axes) -> None:
    plot.set_xlabel("step")
    plot.set_ylabel("nats per byte")
    pictures.tidy(plot)
