"""Runs the programs of docs/look_up/issues.md on both libraries; prints a table."""

import argparse
import ast
import os
import re
from collections.abc import Sequence

from benchmarks import groups, libraries, recorded, tables
from benchmarks.issues import figures
from benchmarks.libraries import FLAX, GRAFTREE

OPTIONS = {FLAX: (), GRAFTREE: ("-m", "graftree.dropin")}


def main() -> None:
    """Prints a row for each figure of the programs that were asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.issues", description=__doc__
    )
    parser.add_argument("programs", nargs="*", default=figures.PROGRAMS)
    words = f"write the times into {recorded.FILE.name}, too"
    parser.add_argument("--record", action="store_true", help=words)
    options = parser.parse_args()
    load = f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    print(f"{libraries.versions('flax')}, {load}")
    print("", tables.head(["problem", "figure"], [*OPTIONS]), sep="\n")
    measured = []
    for program in options.programs:
        for row in _rows(program):
            print(tables.line(row), flush=True)
            measured += _time(_title(program), row)
    if options.record:
        recorded.record(libraries.versions("flax"), measured)


def _rows(program: str) -> list[list[str]]:
    measured = [figures.measure(program, *options) for options in OPTIONS.values()]
    labels = dict.fromkeys(label for found in measured for label in found)
    if len(labels) > 1:  # the error stands in place of what is missing
        labels.pop(figures.ERROR, None)
    values = [
        [found.get(label, found.get(figures.ERROR, "0")) for found in measured]
        for label in labels
    ]
    title = [_title(program)] + [""] * (len(labels) - 1)
    return [
        [first, label, *row]
        for first, label, row in zip(title, labels, values, strict=True)
    ]


def _time(problem: str, row: Sequence[str]) -> list[recorded.Measured]:
    """A row as a group of measurements, if it has times of both libraries."""
    _, label, *cells = row
    times = [re.fullmatch(r"([\d.]+) (µs|ms)", cell) for cell in cells]
    if not all(times):
        return []
    digits = len(times[0][1].partition(".")[2])
    quantity = groups.Quantity(times[0][2], 1, recorded.not_again, digits)
    rows = tuple(groups.Row(x, "", recorded.not_again) for x in OPTIONS)
    group = groups.Group(f"{problem}: {label}", quantity, rows)
    return [recorded.Measured(group, tuple(float(x[1]) for x in times))]


def _title(program: str) -> str:
    """The first words of its docstring."""
    tree = ast.parse((figures.FOLDER / f"{program}.py").read_text())
    return str(ast.get_docstring(tree)).splitlines()[0].partition(":")[0]


if __name__ == "__main__":
    main()
