"""Runs many random programs, and prints those that differ, shrunk.

Example:
    python -m tests.differential --programs 5000 --seed 1
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

from tests.differential import generator, running

FREED_EVERY = 100


def is_right(program, find):
    """Asks for a difference in all modes; prints it, with the smallest program."""
    for mode in program.modes:
        if find(program, mode) is not None:
            smaller = running.shrunk(program, mode, find)
            print(f"\n--- seed {program.seed}, {mode}", *smaller.statements, sep="\n")
            print("---", *(find(smaller, mode) or ["not found again"]))
            return False
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--programs", type=int, default=1000, help="how many")
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    text = "compare calls with caches and without, not with plain Python"
    parser.add_argument("--caches", action="store_true", help=text)
    given = parser.parse_args()
    find = running.difference_of_caches if given.caches else running.difference
    failed = []
    for number in range(given.programs):
        seed = given.seed + number
        if not is_right(generator.make(seed), find):
            failed.append(seed)
        if number % FREED_EVERY == FREED_EVERY - 1:
            running.clear()
            print(f"{number + 1} programs, {len(failed)} failed", flush=True)
    print(f"\n{given.programs} programs, {len(failed)} failed: {failed}")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
