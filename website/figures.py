"""Figures of pages, from the one file that the benchmarks write.

`quotations.py` says where pages quote what was measured. ``corrected`` puts the figures
of ``benchmarks/measured.json`` in these places, those of the newest versions, with as
many decimals as the page shows; ``faults`` tells where that would change a page.
``unquoted`` finds figures with a unit of speed that no quotation has.
"""

import functools
import json
import pathlib
import re
from collections.abc import Iterator

from benchmarks import recorded
from website import pages
from website.quotations import (
    EQUINOX,
    FLAT,
    FLAX_DEFAULT,
    NUMBER,
    OF_OTHERS,
    OURS,
    QUOTATIONS,
    Quotation,
)

# Where the page of the measurements has the tables.
_TABLES = "<!-- the tables of benchmarks/measured.json -->"

PICTURE = pages.DOCS / "pictures" / "cost_of_a_step.png"


@functools.cache
def measured() -> dict[str, recorded.Measured]:
    """The groups of the newest versions, by name."""
    runs = recorded.read()
    newest = max(map(_end, runs))
    return {
        name: x
        for run in runs
        if _end(run) == newest
        for name, x in run.measured.items()
    }


def _end(run: recorded.Run) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", run.end)]


def corrected(page: str, text: str) -> str:
    """The text of a page with the figures that were measured.

    Raises:
        LookupError: If the page lacks a quotation, or the file a figure.
    """
    for quotation in QUOTATIONS:
        if quotation.page == page:
            match = quotation.pattern.search(text)
            if match is None:
                raise LookupError(f"{page} has no words like {quotation.words!r}")
            for i in reversed(range(len(quotation.figures))):
                start, end = match.span(i + 1)
                text = text[:start] + _figure(quotation, i, match[i + 1]) + text[end:]
    return text


def _figure(quotation: Quotation, index: int, said: str) -> str:
    group, label = quotation.figures[index]
    if group not in measured():
        raise LookupError(f"{recorded.FILE.name} has no group {group!r}")
    value = quotation.scale * measured()[group].figure(label)
    return f"{value:,.{len(said.partition('.')[2])}f}"


def faults(page: str, text: str) -> Iterator[str]:
    """The lines of a page whose figures are not those measured."""
    right = corrected(page, text).splitlines()
    for number, (said, line) in enumerate(
        zip(text.splitlines(), right, strict=True), 1
    ):
        if said != line:
            yield f"{page}:{number}: the page says\n{said}\nmeasured were\n{line}"


_SPEED = re.compile(NUMBER + r"\s*(?:µs|ms|ns|tokens/s)(?![\w/])")
_CODE = re.compile(r"^ *```.*?^ *```$", re.M | re.S)


def unquoted(page: str, text: str) -> Iterator[str]:
    """Figures of speed, outside code, that no quotation has."""
    spans = [
        match.span()
        for quotation in QUOTATIONS
        if quotation.page == page
        for match in quotation.pattern.finditer(text)
    ]
    spans += [match.span() for match in _CODE.finditer(text)]
    for match in _SPEED.finditer(text):
        if match[0] in OF_OTHERS.get(page, ()):
            continue
        if not any(start <= match.start() < end for start, end in spans):
            yield f"{page}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"


def with_tables(text: str) -> str:
    """The page of the measurements with its tables; any other page as it is."""
    if _TABLES not in text:
        return text
    return text.replace(_TABLES, recorded.page(recorded.read()))


# ----------------------------------------------------------------------- the picture

_DEPTHS = 4, 50, 200
_COLORS = {OURS: "#00796b", EQUINOX: "#9e9e9e", FLAX_DEFAULT: "#cfcfcf"}


def ratios() -> dict[str, list[float]]:
    """What the picture shows: of each label the times of raw JAX, by depth."""
    groups = [measured()[f"train step, {depth} layers, plain"] for depth in _DEPTHS]
    return {
        label: [round(g.figure(label) / g.figure(FLAT), 2) for g in groups]
        for label in _COLORS
    }


def draw(path: pathlib.Path = PICTURE) -> None:
    """Draws the bars; the file says of what, so that a test sees if that is old."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 2.8), layout="constrained")
    for i, (label, values) in enumerate(ratios().items()):
        places = [depth + (i - 1) * 0.27 for depth in range(len(_DEPTHS))]
        name = label.partition(",")[0]
        axes.barh(places, values, 0.25, label=name, color=_COLORS[label])
        for place, value in zip(places, values, strict=True):
            x = max(value, 1) + 0.1  # beside the line of raw JAX, not on it
            axes.text(x, place, f"{value:.2g}", va="center", fontsize=8)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(_DEPTHS)), [f"{depth} layers" for depth in _DEPTHS])
    axes.invert_yaxis()
    axes.set_xlabel(
        "time of a training step, relative to jax.jit on a flat list of arrays"
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    said = {"Software": None, "Description": json.dumps(ratios())}
    figure.savefig(path, dpi=120, facecolor="white", metadata=said)
    pyplot.close(figure)


def write() -> int:
    """Puts the figures into the pages, and draws the picture; gives 0."""
    for page in dict.fromkeys(quotation.page for quotation in QUOTATIONS):
        path = pages.ROOT / page
        path.write_text(corrected(page, path.read_text()))
    draw()
    return 0
