"""The command line: ``python -m examples.flax_programs [NAME ...]``."""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

FOLDER = pathlib.Path(__file__).parent
NAMES = (
    "vae",
    "seq2seq",
    "vit",
    "diffusion",
    "ppo",
    "lora",
    "ensemble",
    "scan_layers",
    "gan",
    "weight_tying",
)
LIBRARIES = {"Flax": [], "Graftree": ["-m", "graftree.dropin"]}
# Of the losses of the first steps; later ones may part, for training amplifies
# differences in the last bit.
COMPARED = 20
TOLERANCE = 1e-4


def run(name: str, start: Sequence[str]) -> dict[str, Any]:
    """What ``measure.py`` tells of a program, on one of the two libraries.

    Raises:
        RuntimeError: If the program fails; with what it printed.
    """
    command = [sys.executable, *start, str(FOLDER / "measure.py"), name]
    completed = subprocess.run(command, capture_output=True, text=True)
    if completed.returncode:
        raise RuntimeError(f"{name} failed: {' '.join(command)}\n{completed.stderr}")
    return json.loads(completed.stdout.splitlines()[-1])


def difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest relative difference between the losses of the first steps."""
    pairs = zip(ours[:COMPARED], theirs[:COMPARED], strict=True)
    return max(abs(a - b) / max(abs(b), 1e-3) for a, b in pairs)


def lines(names: Sequence[str]) -> Iterator[str]:
    """The table, line by line, as the programs end."""
    yield (
        "| program | last losses | goal | losses differ by "
        "| trace and compile, s: Flax | Graftree | step, ms: Flax | Graftree |"
    )
    yield "|---|--:|--:|--:|--:|--:|--:|--:|"
    for name in names:
        theirs, ours = (run(name, start) for start in LIBRARIES.values())
        if (theirs["library"], ours["library"]) != ("flax", "graftree"):
            raise RuntimeError(f"{name} ran on {theirs['library']}, {ours['library']}.")
        last = statistics.mean(ours["losses"][-10:])
        apart = difference(ours["losses"], theirs["losses"])
        yield (
            f"| {name} | {last:.4g} | {ours['goal']:.4g} | {apart:.1e} "
            f"| {theirs['first']:.2f} | {ours['first']:.2f} "
            f"| {1e3 * theirs['step']:.2f} | {1e3 * ours['step']:.2f} |"
        )
        if last >= ours["goal"] or apart > TOLERANCE:
            yield f"FAILED: {name} misses its goal, or its losses are not those of Flax"


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table for the programs that are named, or for all."""
    parser = argparse.ArgumentParser(
        "python -m examples.flax_programs", description=main.__doc__
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    names = parser.parse_args(arguments).names
    unknown = {*names} - {*NAMES}
    if unknown:
        parser.error(f"no program {sorted(unknown)}; there are {', '.join(NAMES)}")
    failed = False
    for line in lines(names or NAMES):
        print(line, flush=True)
        failed |= line.startswith("FAILED")
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
