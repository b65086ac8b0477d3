"""Lays text out in lines: what fits stands on one line, the rest on several.

A `Block` is the text of an object with parts; anything else is one piece of text. The
width does not count the codes of colors.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

WIDTH = 88
_CODES = re.compile("\033\\[\\d+m")


@dataclasses.dataclass
class Block:
    """A text of parts between a start and an end.

    Attributes:
        start: The text before the parts.
        parts: The parts.
        end: The text after the parts.
        comment: What follows the start where the parts are on lines of their own.
        flat: All of it on one line; ``None`` if that is too long.
    """

    start: str
    parts: list[Part]
    end: str
    comment: str = ""
    flat: str | None = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        texts = [part.flat for part in self.parts]
        self.flat = None
        if None not in texts:
            text = self.start + ", ".join(map(str, texts)) + self.end
            self.flat = text if fits(text) else None


@dataclasses.dataclass
class Part:
    """A part of a `Block`.

    Attributes:
        prefix: The text before its value.
        value: Its value.
        is_packed: Whether it may share a line with its neighbours.
    """

    prefix: str
    value: str | Block
    is_packed: bool = False

    @property
    def flat(self) -> str | None:
        """The part on one line; ``None`` if that is too long."""
        text = self.value if isinstance(self.value, str) else self.value.flat
        if text is None or "\n" in text:
            return None
        return self.prefix + text


def without_colors(text: str) -> str:
    """A text without the codes of colors."""
    return _CODES.sub("", text)


def fits(text: str, room: int = WIDTH) -> bool:
    """Whether a text is one line, and not too long."""
    return "\n" not in text and len(without_colors(text)) <= room


def lines(block: Block) -> str:
    """The text of an object, with its parts on lines of their own."""
    return "\n".join(_lines(Part("", block), 0, "", opened=bool(block.parts)))


def _lines(part: Part, indent: int, end: str, *, opened: bool = False) -> Iterator[str]:
    flat, value, margin = part.flat, part.value, " " * indent
    if flat is not None and not opened and fits(flat + end, WIDTH - indent):
        yield margin + flat + end
    elif isinstance(value, str):
        yield margin + part.prefix + value.replace("\n", "\n" + margin) + end
    elif not opened and (wrapped := _wrapped(part.prefix, value, indent, end)):
        yield from wrapped
    else:
        yield margin + part.prefix + value.start + value.comment
        rows = list(_rows(value.parts, WIDTH - indent - 2))
        for number, row in enumerate(rows, start=1):
            comma = "," if number < len(rows) else ""
            if len(row) > 1:
                yield f"{margin}  {', '.join(str(part.flat) for part in row)}{comma}"
            else:
                yield from _lines(row[0], indent + 2, comma)
        yield margin + value.end + end


def _wrapped(prefix: str, block: Block, indent: int, end: str) -> list[str]:
    """A small object on two lines; empty if it is larger."""
    texts = [part.flat for part in block.parts]
    if None in texts:
        return []
    for count in range(len(texts) - 1, 0, -1):
        first = prefix + block.start + ", ".join(map(str, texts[:count])) + ","
        second = ", ".join(map(str, texts[count:])) + block.end + end
        if fits(first, WIDTH - indent):
            margin = " " * indent
            lines = [margin + first, f"{margin}    {second}"]
            return lines if fits(second, WIDTH - indent - 4) else []
    return []


def _rows(parts: list[Part], room: int) -> Iterator[list[Part]]:
    """Groups the parts that share a line: neighbours that may, as many as fit."""
    row: list[Part] = []
    for part in parts:
        is_packed = part.is_packed and part.flat is not None
        texts = [str(packed.flat) for packed in (*row, part)]
        if row and not (is_packed and fits(", ".join(texts) + ",", room)):
            yield row
            row = []
        if is_packed:
            row.append(part)
        else:
            yield [part]
    if row:
        yield row
