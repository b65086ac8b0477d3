"""What commands printed that take too long to run with a page: ``benchmarks/printed/``.

    $ python -m examples.flax_programs             the command
    Python 3.13.0, JAX 0.12.0; two cores; ...      the versions, the machine, the day

    | program | last losses | ...                  its output, or a part of it

A page that has the first line of an output has all of it. To measure again, put what
the command prints into its file; ``python -m website figures`` puts it into the page.
"""

import functools
from collections.abc import Iterator

from website import pages

FOLDER = pages.ROOT / "benchmarks" / "printed"


@functools.cache
def outputs() -> dict[str, list[str]]:
    """The lines of each output, by the name of its file."""
    parts = {x.stem: x.read_text().partition("\n\n") for x in FOLDER.glob("*.txt")}
    return {name: output.splitlines() for name, (_, _, output) in parts.items()}


def on_page(lines: list[str]) -> Iterator[tuple[int, int, list[str]]]:
    """The outputs that a page has: the first line of each, the line after it, and it.

    On the page, an output ends before an empty line, or the end of its block.
    """
    for output in outputs().values():
        if output[0] in lines:
            start = end = lines.index(output[0])
            while end < len(lines) and lines[end] and not lines[end].startswith("```"):
                end += 1
            yield start, end, output


def corrected(text: str) -> str:
    """The text of a page, with the outputs as they were recorded."""
    lines = text.split("\n")
    for start, end, output in sorted(on_page(lines), reverse=True):
        lines[start:end] = output
    return "\n".join(lines)
