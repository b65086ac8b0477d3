"""Figures of pages, from what was recorded when they were measured.

`quotations.py` says where pages quote ``benchmarks/measured.json``. ``corrected`` puts
its figures in these places, those of the newest versions, with as many decimals as the
page shows, and the outputs of `printed.py`; ``faults`` tells where that would change a
page. ``unquoted`` finds measured figures that come from neither, nor from a block of
their page. Measured are

- all figures in seconds (``s``, ``ms``, ``µs``), in tokens/s and in percent;
- decimal numbers of bytes, operations and longer times, such as 1.13 GiB;
- all rows of a table whose heading has one of these units.

A whole number of bytes or of minutes is a fact, or a limit.
"""

import functools
import itertools
import json
import pathlib
import re
from collections.abc import Iterator

from benchmarks import recorded
from website import pages, printed
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
    return printed.corrected(text)


def _figure(quotation: Quotation, index: int, said: str) -> str:
    group, label = quotation.figures[index]
    if group not in measured():
        raise LookupError(f"{recorded.FILE.name} has no group {group!r}")
    value = quotation.scale * measured()[group].figure(label)
    return f"{value:,.{len(said.partition('.')[2])}f}"


def faults(page: str, text: str) -> Iterator[str]:
    """The lines of a page whose figures are not those measured."""
    right = corrected(page, text).splitlines()
    both = itertools.zip_longest(text.splitlines(), right, fillvalue="nothing")
    for number, (said, line) in enumerate(both, 1):
        if said != line:
            yield f"{page}:{number}: the page says\n{said}\nmeasured were\n{line}"


_MEASURED = re.compile(
    rf"{NUMBER}\s*(?:µs|ms|ns|tokens/s|(?:micro|milli)seconds?|percent|%)(?![\w/])"
    rf"|{NUMBER} s\b"
    r"|\d[\d,]*\.\d+ (?:[kKMGT]i?B|bytes|[MGT]?flops?|seconds|minutes|hours)\b"
)
_CODE = re.compile(r"^ *```.*?^ *```$|`[^`\n]+`", re.M | re.S)
_TABLE = re.compile(r"^\|(?P<heading>.*)\n(?:\|.*\n)+", re.M)
_ROW = re.compile(r"^\|.*\d.*$", re.M)
_UNIT = re.compile(r"[,:] *(?:µs|ms|s|B|B per device|bytes|%)(?=[ :|])|tokens/s")


def unquoted(page: str, text: str) -> Iterator[str]:
    """Measured figures, outside code, that were recorded nowhere."""
    recorded_spans = [*_recorded(page, text)]
    code_spans = [match.span() for match in _CODE.finditer(text)]
    blocks = pages.Page(pages.ROOT / page, text).blocks
    shown = {
        x for block in blocks for x in re.findall(r"[\d.,]*\d", block.output or "")
    }
    candidates = [
        (match, recorded_spans + code_spans)
        for match in _MEASURED.finditer(text)
        if match[0] not in OF_OTHERS.get(page, ())
        and re.findall(NUMBER, match[0])[0] not in shown
    ]
    for table in _TABLE.finditer(text):
        if _UNIT.search(table["heading"]):
            rows = _ROW.finditer(text, *table.span())
            candidates += [(match, recorded_spans) for match in rows]
    for match, spans in sorted(candidates, key=lambda x: x[0].start()):
        if not any(start <= match.start() < end for start, end in spans):
            yield f"{page}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"


def _recorded(page: str, text: str) -> Iterator[tuple[int, int]]:
    """The parts of a page that were recorded, as spans of its text."""
    lines = text.splitlines(keepends=True)
    starts = [0, *itertools.accumulate(map(len, lines))]
    for start, end, _ in printed.on_page(text.splitlines()):
        yield starts[start], starts[end]
    for quotation in QUOTATIONS:
        if quotation.page == page:
            yield from (match.span() for match in quotation.pattern.finditer(text))


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
    for path in [pages.ROOT / "README.md", *pages.DOCS.rglob("*.md")]:
        page = path.relative_to(pages.ROOT).as_posix()
        path.write_text(corrected(page, path.read_text()))
    draw()
    return 0
