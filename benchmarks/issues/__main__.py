"""Runs the programs of docs/look_up/issues.md on both libraries; prints a table."""

import argparse
import ast
import os

from benchmarks import libraries, tables
from benchmarks.issues import figures
from benchmarks.libraries import FLAX, GRAFTREE

OPTIONS = {FLAX: (), GRAFTREE: ("-m", "graftree.dropin")}


def main() -> None:
    """Prints a row for each figure of the programs that were asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.issues", description=__doc__
    )
    parser.add_argument("programs", nargs="*", default=figures.PROGRAMS)
    load = f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    print(f"{libraries.versions('flax')}, {load}")
    print("", tables.head(["problem", "figure"], [*OPTIONS]), sep="\n")
    for program in parser.parse_args().programs:
        for row in _rows(program):
            print(tables.line(row), flush=True)


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


def _title(program: str) -> str:
    """The first words of its docstring."""
    tree = ast.parse((figures.FOLDER / f"{program}.py").read_text())
    return str(ast.get_docstring(tree)).splitlines()[0].partition(":")[0]


if __name__ == "__main__":
    main()
