"""The command line: ``python -m examples.flax_programs [--packages] [NAME ...]``."""

import argparse
import ast
import importlib.util
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import venv
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
# With --packages: programs on packages from PyPI, in an environment of their own.
PACKAGES = FOLDER / "packages"
ENVIRONMENT = pathlib.Path("out/flax_packages")


def run(name: str, start: Sequence[str], python: str) -> dict[str, Any]:
    """What ``measure.py`` reports of a program, on one of the two libraries.

    Raises:
        RuntimeError: If the program fails; with what it printed.
    """
    command = [python, *start, str(FOLDER / "measure.py"), name]
    completed = subprocess.run(
        command, capture_output=True, text=True, env=environment_variables()
    )
    if completed.returncode:
        raise RuntimeError(f"{name} failed: {' '.join(command)}\n{completed.stderr}")
    return json.loads(completed.stdout.splitlines()[-1])


def environment_variables() -> dict[str, str]:
    """Those of this process; any Python finds this Graftree with them."""
    specification = importlib.util.find_spec("graftree")
    assert specification is not None and specification.origin is not None
    source = str(pathlib.Path(specification.origin).parent.parent)
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


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
        yield from rows(
            name, sys.executable, f"| {name} | {{last:.4g}} | {{goal:.4g}} "
        )


def lines_of_packages(names: Sequence[str]) -> Iterator[str]:
    """The table of programs on packages from PyPI."""
    python = python_with_packages()
    versions = dict(re.findall(r"^(\S+)==(\S+)", requirements(), re.MULTILINE))
    yield (
        "| package | what runs | losses differ by "
        "| trace and compile, s: Flax | Graftree | step, ms: Flax | Graftree |"
    )
    yield "|---|---|--:|--:|--:|--:|--:|"
    for name in names:
        summary = ast.get_docstring(ast.parse((PACKAGES / f"{name}.py").read_text()))
        package, _, text = str(summary).partition(": ")
        start = f"| {package} {versions[package]} | {text.rstrip('.')} "
        yield from rows(f"packages.{name}", python, start)


def rows(name: str, python: str, start: str) -> Iterator[str]:
    """The row of a program, and a line that it failed, if it did."""
    theirs, ours = (run(name, library, python) for library in LIBRARIES.values())
    if (theirs["library"], ours["library"]) != ("flax", "graftree"):
        raise RuntimeError(f"{name} ran on {theirs['library']}, {ours['library']}.")
    last = statistics.mean(ours["losses"][-10:])
    apart = difference(ours["losses"], theirs["losses"])
    yield (
        start.format(last=last, goal=ours["goal"]) + f"| {apart:.1e} "
        f"| {theirs['first']:.2f} | {ours['first']:.2f} "
        f"| {1e3 * theirs['step']:.2f} | {1e3 * ours['step']:.2f} |"
    )
    if last >= ours["goal"] or apart > TOLERANCE:
        yield f"FAILED: {name} misses its goal, or its losses are not those of Flax"


def requirements() -> str:
    """The packages and their versions, one per line."""
    return (PACKAGES / "requirements.txt").read_text()


def python_with_packages() -> str:
    """The Python of the environment with the packages; makes it if it is missing."""
    python = str(ENVIRONMENT / "bin" / "python")
    installed = ENVIRONMENT / "installed.txt"
    if not (installed.exists() and installed.read_text() == requirements()):
        print(f"Installing the packages into {ENVIRONMENT}.", file=sys.stderr)
        venv.create(ENVIRONMENT, with_pip=True, clear=True)
        file = str(PACKAGES / "requirements.txt")
        subprocess.run([python, "-m", "pip", "install", "-q", "-r", file], check=True)
        installed.write_text(requirements())
    return python


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the programs that are named, or all, on Flax and on Graftree."""
    packages = sorted(path.stem for path in PACKAGES.glob("*.py"))
    parser = argparse.ArgumentParser(
        "python -m examples.flax_programs",
        description=main.__doc__,
        epilog=f"With --packages: {', '.join(packages)}",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument(
        "--packages",
        action="store_true",
        help="instead, programs that use packages from PyPI; the first time, these "
        f"are installed into {ENVIRONMENT} (about 1.5 GB)",
    )
    options = parser.parse_args(arguments)
    choices = packages if options.packages else NAMES
    unknown = {*options.names} - {*choices}
    if unknown:
        parser.error(f"no program {sorted(unknown)}; there are {', '.join(choices)}")
    failed = False
    table = lines_of_packages if options.packages else lines
    for line in table(options.names or choices):
        print(line, flush=True)
        failed |= line.startswith("FAILED")
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
