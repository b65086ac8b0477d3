"""Runs the measurements and prints their table: ``python -m benchmarks --help``."""

import argparse
import platform

import jax

from benchmarks import rows, timing


def main() -> None:
    """Measures every group that was asked for and prints a table of it."""
    options = _parser().parse_args()
    rounds, seconds = (3, 0.002) if options.quick else (25, 0.02)
    print(
        f"Python {platform.python_version()}, JAX {jax.__version__}, "
        f"{jax.default_backend()}; median of {rounds} turns; times in microseconds"
    )
    for group in rows.groups():
        if options.only in group.name:
            operations = [row.set_up() for row in group.rows]
            times = timing.medians(operations, rounds=rounds, seconds=seconds)
            print(_table(group, times), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="few short turns: does it run at all?"
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="groups whose name has this text"
    )
    return parser


def _table(group: rows.Group, times: list[float]) -> str:
    """The times of a group, with ratios to raw JAX and to Flax NNX in the same mode."""
    measured = {
        (row.library, row.variant): time
        for row, time in zip(group.rows, times, strict=True)
    }
    raw = next(time for (library, _), time in measured.items() if library == rows.RAW)
    lines = [f"\n{group.name:45} {'time':>9} {'/ raw':>8} {'/ Flax':>8}"]
    for (library, variant), time in measured.items():
        flax = measured.get((rows.FLAX, variant))
        ratio = f"{time / flax:8.2f}" if flax and library == "Graftree" else ""
        label = f"  {library}  {variant}"
        lines.append(f"{label:45} {time * 1e6:9.1f} {time / raw:8.2f} {ratio:>8}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
