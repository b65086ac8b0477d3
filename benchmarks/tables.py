"""Tables of what was measured, in Markdown: for a page, and to be read as they are.

Beside each figure stand its ratio to raw JAX and, for Graftree, the ratios to the
peers: to Flax NNX in the same mode, and to Equinox.
"""

from collections.abc import Iterable, Sequence

from benchmarks.groups import Group, Row
from benchmarks.libraries import EQUINOX, FLAX, GRAFTREE, RAW


def line(cells: Iterable[str]) -> str:
    """A row of a table."""
    return f"| {' | '.join(cells)} |"


def head(texts: Sequence[str], cells: Sequence[str]) -> str:
    """The two rows above: of columns with text, and then of those with numbers."""
    marks = [":--"] * len(texts) + ["--:"] * len(cells)
    return f"{line([*texts, *cells])}\n{line(marks)}"


def markdown(group: Group, figures: Sequence[float]) -> str:
    """The figures of a group, without columns that would be empty."""
    cells = _cells(group, figures)
    header = [group.quantity.unit, "/ raw", "/ Flax", "/ Equinox", "target"]
    used = [any(column) for column in zip(*cells, strict=True)]
    header, *cells = [
        [cell for cell, keep in zip(row, used, strict=True) if keep]
        for row in (header, *cells)
    ]
    lines = [line([label(r), *c]) for r, c in zip(group.rows, cells, strict=True)]
    return "\n".join(["", head([group.name], header), *lines])


def label(row: Row) -> str:
    """How a row is called."""
    return f"{row.library}, {row.variant}" if row.variant else row.library


def _cells(group: Group, figures: Sequence[float]) -> list[list[str]]:
    """Of each row its figure, its ratios and the target."""
    measured = [*zip(group.rows, figures, strict=True)]
    digits = group.quantity.digits

    def ratio(figure, library, variant=None):
        others = (
            other
            for row, other in measured
            if row.library == library and variant in (None, row.variant)
        )
        other = next(others, None)
        has_ratio = group.quantity.has_ratios and other is not None
        return f"{figure / other:.2f}" if has_ratio else ""

    def cells(row, figure):
        yield f"{round(figure, digits) + 0.0:,.{digits}f}"  # no minus before a zero
        yield ratio(figure, RAW)
        is_ours = row.library == GRAFTREE
        yield ratio(figure, FLAX, row.variant) if is_ours else ""
        yield ratio(figure, EQUINOX) if is_ours else ""
        yield group.target if is_ours else ""

    return [[*cells(row, figure)] for row, figure in measured]
