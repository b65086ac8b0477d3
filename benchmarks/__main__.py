"""Measures Graftree beside raw JAX, Flax NNX and Equinox, and prints tables of it."""

import argparse
import dataclasses
import importlib.metadata
import platform

import jax

from benchmarks import (
    argument_rows,
    gauges,
    generation,
    language_model_rows,
    rows,
    tables,
)

PEERS = ("flax", "equinox")


def main() -> None:
    """Measures every group that was asked for and prints a table of it."""
    options = _parser().parse_args()
    effort = gauges.QUICK if options.quick else gauges.FULL
    if options.fastest:
        effort = dataclasses.replace(effort, pick=min)
    table = tables.markdown if options.markdown else tables.text
    print(_setting(effort))
    quick = options.quick
    groups = (
        *rows.groups(quick),
        *argument_rows.groups(quick),
        *language_model_rows.groups(quick),
    )
    for group in (*groups, *generation.groups()):
        if options.only in group.name:
            operations = [row.set_up() for row in group.rows]
            figures = group.quantity.measure(operations, effort)
            print(table(group, figures), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="few short turns: some minutes in all"
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="groups whose name has this text"
    )
    parser.add_argument(
        "--fastest",
        action="store_true",
        help="the fastest turn, not the median: for a machine that is not idle",
    )
    parser.add_argument("--markdown", action="store_true", help="tables for a page")
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
