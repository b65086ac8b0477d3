"""A page as text: its blocks of code, and what stands after each of them.

    ```python needs="torch"            a block; without `torch` it is left out
    loss                               its last expression is shown, as in a notebook
    ```

    ```text title="Output"             what the block prints, and then that value
    0.25
    ```

    ![The loss falls](loss.png)        the figure that the block has made

A block of shell commands (``sh``) runs if an output stands after it: commands that are
short and need no network have one. A block may be indented, as those within tabs and
notes are.
"""

import dataclasses
import importlib.util
import pathlib
import re
import textwrap

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"

OUTPUT = 'text title="Output"'


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of Python in a page, or of shell commands with an output.

    Attributes:
        language: ``"python"`` or ``"sh"``.
        code: What runs, without its indentation.
        line: The number of its first line in the page, from 1.
        end: The index of the line after the closing fence.
        indent: The spaces before its fence.
        needs: The package without which it is left out, or an empty string.
        output: What the page says that it prints, or None.
        after: The index of the line after that output, else ``end``.
        picture: Where its figure belongs, relative to the page, or None.
    """

    language: str
    code: str
    line: int
    end: int
    indent: str
    needs: str
    output: str | None
    after: int
    picture: str | None

    @property
    def can_run(self) -> bool:
        return not self.needs or importlib.util.find_spec(self.needs) is not None


@dataclasses.dataclass(frozen=True)
class Page:
    """A page of Markdown."""

    path: pathlib.Path
    text: str

    @property
    def name(self) -> str:
        """Its path within ``docs``, or its file's name elsewhere."""
        is_ours = self.path.is_relative_to(DOCS)
        return str(self.path.relative_to(DOCS)) if is_ours else self.path.name

    @property
    def blocks(self) -> list[Block]:
        return [block for block in self._blocks if _runs(block)]

    @property
    def commands(self) -> int:
        """How many blocks of shell commands it shows without an output."""
        return sum(not _runs(block) for block in self._blocks)

    @property
    def _blocks(self) -> list[Block]:
        lines = self.text.splitlines()
        return [
            _block(lines, start, stop, match)
            for start, stop, match in fences(lines)
            if match["language"] in ("python", "sh")
        ]


def _runs(block: Block) -> bool:
    return block.language == "python" or block.output is not None


def read(path: pathlib.Path) -> Page:
    """Reads one page."""
    return Page(path, path.read_text())


def all_pages() -> list[Page]:
    """The pages of the site that are written by hand."""
    return [read(path) for path in sorted(DOCS.rglob("*.md"))]


_FENCE = re.compile(r"(?P<indent> *)```(?P<language>\w*)(?P<options>.*)")
_NEEDS = re.compile(r'needs="([\w.]+)"')
_PICTURE = re.compile(r"\s*!\[[^\]]*\]\((?P<path>[^)]+)\)")


def fences(lines: list[str]) -> list[tuple[int, int, re.Match[str]]]:
    """The fenced blocks, as (first line, line after the last, the opening fence)."""
    found, opening = [], None
    for index, line in enumerate(lines):
        match = _FENCE.fullmatch(line)
        if match and opening is None:
            opening = index, match
        elif opening and line.rstrip() == opening[1]["indent"] + "```":
            found.append((opening[0], index + 1, opening[1]))
            opening = None
    if opening is not None:
        raise ValueError(f"the block that begins in line {opening[0] + 1} has no end")
    return found


def _block(lines: list[str], start: int, end: int, fence: re.Match[str]) -> Block:
    needs = _NEEDS.search(fence["options"])
    after, output = _output(lines, end, fence["indent"])
    return Block(
        language=fence["language"],
        code=_inside(lines, start, end),
        line=start + 2,
        end=end,
        indent=fence["indent"],
        needs=needs[1] if needs else "",
        output=output,
        after=after,
        picture=_picture(lines, after),
    )


def _inside(lines: list[str], start: int, end: int) -> str:
    return textwrap.dedent("\n".join(lines[start + 1 : end - 1]) + "\n")


def _output(lines: list[str], end: int, indent: str) -> tuple[int, str | None]:
    start = _next_line(lines, end)
    if start is None or lines[start] != f"{indent}```{OUTPUT}":
        return end, None
    stop = lines.index(f"{indent}```", start) + 1
    width = len(indent)
    return stop, "\n".join(line[width:] for line in lines[start + 1 : stop - 1])


def _picture(lines: list[str], after: int) -> str | None:
    """The picture that comes right after; its alt text may go over several lines."""
    start = _next_line(lines, after)
    match = _PICTURE.match("\n".join(lines[start:])) if start is not None else None
    return match["path"] if match else None


def _next_line(lines: list[str], index: int) -> int | None:
    """The next line that is not empty."""
    return next((i for i in range(index, len(lines)) if lines[i].strip()), None)
