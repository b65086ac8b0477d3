"""Tables of what was measured, as text or as Markdown.

Beside each figure stand its ratio to raw JAX and, for Graftree, the ratios to the
peers: to Flax NNX in the same mode, and to Equinox.
"""

from collections.abc import Sequence

from benchmarks.libraries import EQUINOX, FLAX, GRAFTREE, RAW
from benchmarks.rows import Group, Row

HEADER = ("/ raw", "/ Flax", "/ Equinox", "target")


def text(group: Group, figures: Sequence[float]) -> str:
    """The figures of a group, for a terminal."""
    lines = [f"\n{group.name:58}" + _aligned(group.quantity.unit, *HEADER)]
    for row, cells in _cells(group, figures):
        lines.append(f"  {label(row):56}" + _aligned(*cells))
    return "\n".join(line.rstrip() for line in lines)


def _aligned(figure: str, *ratios: str) -> str:
    *ratios, target = ratios
    return f"{figure:>11}" + "".join(f"{r:>11}" for r in ratios) + f"  {target}"


def markdown(group: Group, figures: Sequence[float]) -> str:
    """The figures of a group, for a page; without columns that would be empty."""
    header = [group.name, group.quantity.unit, *HEADER]
    body = [[label(row), *cells] for row, cells in _cells(group, figures)]
    used = [any(column) for column in zip(*body, strict=True)]
    lines = [
        " | ".join(cell for cell, keep in zip(cells, used, strict=True) if keep)
        for cells in (header, [":--"] + ["--:"] * (len(header) - 1), *body)
    ]
    return "\n" + "\n".join(f"| {line} |" for line in lines)


def label(row: Row) -> str:
    """How a row is called."""
    return f"{row.library}, {row.variant}" if row.variant else row.library


def _cells(group: Group, figures: Sequence[float]) -> list[tuple[Row, list[str]]]:
    """Each row with its figure, its ratios and the target."""
    measured = dict(zip(group.rows, figures, strict=True))

    def figure_of(library, variant=None):
        matches = (
            figure
            for row, figure in measured.items()
            if row.library == library and variant in (None, row.variant)
        )
        return next(matches, None)

    def ratio(figure, other):
        has_ratio = group.quantity.has_ratios and other is not None
        return f"{figure / other:.2f}" if has_ratio else ""

    def cells(row, figure):
        digits = group.quantity.digits
        scaled = round(figure * group.quantity.scale, digits)
        yield f"{scaled + 0.0:,.{digits}f}"  # no minus before a zero
        yield ratio(figure, figure_of(RAW))
        is_ours = row.library == GRAFTREE
        yield ratio(figure, figure_of(FLAX, row.variant)) if is_ours else ""
        yield ratio(figure, figure_of(EQUINOX)) if is_ours else ""
        yield group.target if is_ours else ""

    return [(row, [*cells(row, figure)]) for row, figure in measured.items()]
