"""Rows of a table, one for many layers that are alike."""

from __future__ import annotations

import re
from collections.abc import Sequence

Row = tuple[str, ...]
_INDEX = re.compile(r"\[(\d+)\]")


def folded(rows: Sequence[Row]) -> list[Row]:
    """One row for those that differ in the indices of their first cell only.

    These become one range, as in ``blocks[0-11].mlp``, or a star.
    """
    return [row for row, _ in groups(rows)]


def groups(rows: Sequence[Row]) -> list[tuple[Row, list[int]]]:
    """The rows of `folded`, each with the numbers of those that it stands for."""
    found: dict[Row, list[int]] = {}
    for number, row in enumerate(rows):
        key = (_INDEX.sub("[*]", row[0]), *row[1:])
        found.setdefault(key, []).append(number)
    return [
        ((_path([rows[number][0] for number in numbers]), *key[1:]), numbers)
        for key, numbers in found.items()
    ]


def _path(paths: list[str]) -> str:
    """One path for several that differ in indices."""
    columns = [*zip(*[map(int, _INDEX.findall(path)) for path in paths], strict=True)]
    ranges = iter([_range(sorted({*column}), len(paths)) for column in columns])
    return _INDEX.sub(lambda _: f"[{next(ranges)}]", paths[0])


def _range(indices: list[int], count: int) -> str:
    first, last = indices[0], indices[-1]
    if first == last:
        return str(first)
    # With gaps, or where two indices vary and not all pairs are there: a star.
    is_whole = len(indices) == last - first + 1 and count % len(indices) == 0
    return f"{first}-{last}" if is_whole else "*"
