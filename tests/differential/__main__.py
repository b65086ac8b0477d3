"""Runs many random programs, and prints those that differ, shrunk.

Example:
    python -m tests.differential --programs 5000 --seed 1 --peer
"""

from __future__ import annotations

import argparse
import collections
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

from tests.differential import captures, generator, known, running, shrinking

MAKERS = {"objects": generator.make, "captures": captures.make}
FREED_EVERY = 100
# The peer runs in its default mode and in that of plain trees.
PEER_MODES = (running.GRAPH_UPDATES, running.TREE)


class Counts:
    """What a run of many programs came to."""

    def __init__(self):
        self.run = 0
        self.failed = []
        self.by_design = collections.Counter()
        self.unknown = collections.Counter()


def check(program, steps, counts):
    """Compares the library with plain Python in all modes; prints what differs."""
    for mode in program.modes:
        expected = steps if mode == running.GRAPH_UPDATES else None
        if running.difference(program, mode, expected=expected) is not None:
            counts.failed.append(program.seed)
            report(program, mode)
            return


def report(program, mode, library="graftree"):
    smaller = shrinking.shrunk(program, mode, library)
    found = running.difference(smaller, mode, library)
    print(f"\n--- seed {program.seed}, {mode}, {library}")
    print("\n".join(smaller.statements))
    print("--- " + " ".join(map(str, found or ["not found again"])), flush=True)


def check_peer(program, steps, counts, prints):
    """Counts where the peer differs from plain Python, and prints the first ones."""
    for mode in program.modes:
        if mode in PEER_MODES:
            expected = steps if mode == running.GRAPH_UPDATES else None
            found = running.difference(program, mode, "flax.nnx", expected)
            if found and (reason := known.reason(program, mode, found)):
                counts.by_design[reason] += 1
            elif found:
                kind = known.kind(program, mode, found)
                counts.unknown[kind] += 1
                if counts.unknown[kind] <= prints:
                    print(f"\n=== {kind}")
                    report(program, mode, "flax.nnx")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--programs", type=int, default=1000, help="how many")
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--kind", choices=MAKERS, help="all kinds if not given")
    parser.add_argument("--peer", action="store_true", help="run them on Flax, too")
    parser.add_argument("--print-peer", type=int, default=0, help="programs per kind")
    given = parser.parse_args()
    makers = [MAKERS[given.kind]] if given.kind else list(MAKERS.values())
    counts = Counts()
    for number in range(given.programs):
        program, steps = makers[number % len(makers)](given.seed + number)
        counts.run += 1
        check(program, steps, counts)
        if given.peer:
            check_peer(program, steps, counts, given.print_peer)
        if number % FREED_EVERY == FREED_EVERY - 1:
            running.clear()
            print(f"{number + 1} programs, {len(counts.failed)} failed", flush=True)
    print(f"\n{counts.run} programs, {len(counts.failed)} failed: {counts.failed}")
    tables = {"by design": counts.by_design, "not in the table": counts.unknown}
    for title, table in tables.items():
        for kind, number in table.most_common():
            print(f"The peer differs, {title}: {number} x {kind}")
    return bool(counts.failed)


if __name__ == "__main__":
    raise SystemExit(main())
