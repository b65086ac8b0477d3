"""Measures Graftree beside raw JAX, Flax NNX and Equinox, and prints tables of it."""

import argparse
import dataclasses
import importlib.metadata
import platform

import jax

from benchmarks import gauges, rows, tables

PEERS = ("flax", "equinox")


def main() -> None:
    """Measures every group that was asked for and prints a table of it."""
    options = _parser().parse_args()
    effort = gauges.QUICK if options.quick else gauges.FULL
    if options.fastest:
        effort = dataclasses.replace(effort, pick=min)
    print(_setting(effort))
    for group in rows.all_groups(options.quick):
        if options.only in group.name:
            print(tables.markdown(group, group.measure(effort)), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    option = parser.add_argument
    option("--quick", action="store_true", help="few short turns: some minutes in all")
    option("--only", default="", metavar="TEXT", help="groups whose name has this text")
    fastest = "the fastest turn, not the median: for a machine that is not idle"
    option("--fastest", action="store_true", help=fastest)
    return parser


def _setting(effort: gauges.Effort) -> str:
    """What the figures were measured with."""
    versions = [f"Python {platform.python_version()}", f"JAX {jax.__version__}"]
    for peer in PEERS:
        try:
            versions.append(f"{peer} {importlib.metadata.version(peer)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {peer}")
    return (
        f"{', '.join(versions)}, {jax.default_backend()}; "
        f"{'fastest' if effort.pick is min else 'median'} of up to {effort.turns} turns"
    )


if __name__ == "__main__":
    main()
