"""What reports and messages are made of: arrays in short, and tables of plain text.

An array is described by its dtype and its shape, ``float32[2,3]``, as JAX does it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

Row = tuple[str, ...]
_INDEX = re.compile(r"\[(\d+)\]")


def describe(x: Any) -> str:
    """The dtype and the shape of an array, or of what stands for one."""
    return describe_form(x.dtype, x.shape)


def describe_form(dtype: Any, shape: Sequence[Any]) -> str:
    """The same of a dtype and a shape."""
    return f"{dtype}{describe_shape(shape)}"


def describe_shape(shape: Sequence[Any]) -> str:
    """Only a shape, as in ``[2,3]``."""
    return f"[{','.join(map(str, shape))}]"


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


def folded_rows(rows: Sequence[Row]) -> list[Row]:
    """One row for those that differ in the indices of their first cell only.

    These become one range, as in ``blocks[0-11].mlp``, or a star.
    """
    return [row for row, _ in groups_of_rows(rows)]


def groups_of_rows(rows: Sequence[Row]) -> list[tuple[Row, list[int]]]:
    """The rows of `folded_rows`, each with the numbers of those that it stands for."""
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
