"""Measures Graftree beside raw JAX, Flax NNX and Equinox, and prints tables of it."""

import argparse
import dataclasses

from benchmarks import gauges, libraries, rows, tables


def main() -> None:
    """Measures every group that was asked for and prints a table of it."""
    options = _parser().parse_args()
    effort = gauges.QUICK if options.quick else gauges.FULL
    if options.fastest:
        effort = dataclasses.replace(effort, pick=min)
    pick = "fastest" if options.fastest else "median"
    setting = libraries.versions("flax", "equinox")
    print(f"{setting}; {pick} of up to {effort.turns} turns")
    missing = set()
    for group in rows.all_groups(options.quick):
        if options.only not in group.name:
            continue
        try:
            print(tables.markdown(group, group.measure(effort)), flush=True)
        except ImportError as error:  # one that is optional, such as a compiler
            missing.add(str(error).splitlines()[0])
    for reason in sorted(missing):
        print(f"\nNot measured: {reason}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    option = parser.add_argument
    option("--quick", action="store_true", help="few short turns: some minutes in all")
    option("--only", default="", metavar="TEXT", help="groups whose name has this text")
    fastest = "the fastest turn, not the median: for a machine that is not idle"
    option("--fastest", action="store_true", help=fastest)
    return parser


if __name__ == "__main__":
    main()
