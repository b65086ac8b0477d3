"""A page with the outputs and pictures of a run in place of its own."""

import pathlib
from collections.abc import Iterable

from website import pages, running


def with_outputs(
    page: pages.Page, results: Iterable[running.Result], *, keep_right: bool
) -> str:
    """The text of a page with the outputs of a run.

    Args:
        page: The page.
        results: What its blocks have done.
        keep_right: Whether an output stays as it is if the run agrees with it.

    Returns:
        The new text.
    """
    lines = page.text.splitlines()
    for result in reversed([*results]):
        if not (keep_right and result.is_as_the_page_says):
            block = result.block
            lines[block.end : block.after] = _output(result.output, block.indent)
    return "\n".join(lines) + "\n"


def _output(text: str, indent: str) -> list[str]:
    if not text:
        return []
    inside = [f"```{pages.OUTPUT}", *text.splitlines(), "```"]
    return ["", *[f"{indent}{line}".rstrip() for line in inside]]


def save_pictures(folder: pathlib.Path, results: Iterable[running.Result]) -> int:
    """Saves the figures that a page shows, relative to its folder; says how many."""
    count = 0
    for result in results:
        if result.figure is not None and result.block.picture is not None:
            path = folder / result.block.picture
            path.parent.mkdir(parents=True, exist_ok=True)
            # The version of matplotlib would make another file of the same picture.
            result.figure.savefig(
                path, dpi=120, facecolor="white", metadata={"Software": None}
            )
            count += 1
    return count
