"""Compares runs: ``python -m examples.lm.compare FOLDER...``.

It prints a table with a row for each folder, and draws the curves over each other. The
first run is the one that the others are compared with.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence

from examples.command_lines import OneLineParser


def make_parser() -> OneLineParser:
    """Returns the parser of the options."""
    parser = OneLineParser(
        prog="python -m examples.lm.compare",
        description="Compares runs of python -m examples.lm: prints a table, and draws "
        "their curves over each other.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, picture = parser.add_argument, pathlib.Path("out/lm-layouts.png")
    runs = "the --output of a run; the others are compared with the first"
    drawn = "where to draw the curves"
    add("folders", nargs="+", type=pathlib.Path, metavar="FOLDER", help=runs)
    add("--picture", type=pathlib.Path, default=picture, metavar="FILE", help=drawn)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparison.

    Args:
        arguments: The options; ``None`` takes them from the command line.

    Returns:
        The exit code: 0; 1 if the picture could not be written.

    Raises:
        SystemExit: With code 2, after one line on stderr, if a folder has no run in it
            that has been trained for a step.
    """
    parser = make_parser()
    options = parser.parse_args(arguments)
    # Not at the top, so that wrong options are answered at once.
    from rich import console as rich_console

    from examples.lm import curves, report

    records = {}
    for folder in options.folders:
        try:
            record = curves.read(folder)
        except ValueError as error:
            parser.error(str(error))
        if record is None or not record.curve.training:
            parser.error(f"{folder} has no run in it")
        name = record.label if record.label not in records else f"{folder}"
        records[name] = record
    console = rich_console.Console()
    for line in report.comparison(records):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    try:
        options.picture.parent.mkdir(parents=True, exist_ok=True)
        report.draw_comparison(records, options.picture)
    except OSError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    console.print(f"the picture is {options.picture}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
