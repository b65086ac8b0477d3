"""Tables of plain text."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], indent: str = "") -> list[str]:
    """The lines of a table, its columns as wide as they need be.

    Args:
        rows: At least one; the first, the header, says how many columns there are. A
            row with fewer cells is a remark, for which no column is made wider.
        indent: What each line begins with.
    """
    whole = [row for row in rows if len(row) == len(rows[0])]
    widths = [max(map(len, column)) for column in zip(*whole, strict=True)]
    return [indent + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
