"""Saving, killed: ``python -m tests.stress.kills --kills 50 --seed 0``.

Each start of `savings` goes on where the last one was killed: at a random time by
SIGKILL, or by itself before one of its operations on files. After each kill this
process reads what is on disk:

- What was reported as finished loads, with the right values, unless newer steps have
  taken its place: of a series the two newest steps, and the single checkpoint.
- What else the API lists loads with the right values too; what it doesn't list gives an
  error.

At the end it saves some more itself, undisturbed; then nothing may be left of the
others.
"""

import argparse
import collections
import functools
import os
import pathlib
import random
import sys
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # also of the processes that it starts

from graftree import checkpoints, errors
from tests.stress import savings, starts


class Expected:
    """What the processes so far have said."""

    def __init__(self):
        self.begun = {"series": -1, "single": -1}
        self.done = {"series": [], "single": []}

    def read(self, lines):
        """Takes in the lines of one start."""
        for words in lines:
            if words[0] in ("begin", "done"):
                what, step = words[1], int(words[2])
                if words[0] == "begin":
                    self.begun[what] = step
                else:
                    self.found(what, step)

    def found(self, what, step):
        """A step is finished: it was reported, or has been read."""
        if step not in self.done[what]:
            self.done[what].append(step)


def check_series(folder, expected):
    """Reads a series as a new process would; returns its steps."""
    begun, done = expected.begun["series"], sorted(expected.done["series"])
    with checkpoints.Checkpoints(folder, keep=savings.KEEP) as kept:
        steps = kept.steps()
        newest = max([*steps, *done], default=-1)
        needed = {step for step in (newest - 1, newest) if step in done}
        if not needed <= {*steps} or newest > begun:
            raise AssertionError(f"{steps} on disk; done {done[-3:]}, begun {begun}")
        for step in steps:
            check_step(functools.partial(kept.restore, step), step)
        if steps:
            check_step(kept.restore_latest, steps[-1])
        if begun not in steps:
            check_absent(kept, folder, begun)
    for step in steps:
        expected.found("series", step)
    return steps


def check_step(restore, step):
    """Restores a step, and compares each value."""
    objects, position = savings.make_objects(), savings.Position()
    restore(**objects, position=position)
    found = savings.step_of(objects)
    if not found == step == position.state["position"]:
        raise AssertionError(f"step {step} has the values of {found}, {position.state}")
    if position.state["seen"][-1] != step:
        raise AssertionError(f"step {step} has a later position: {position.state}")


def check_absent(kept, folder, step):
    """What was not finished gives an error, by its step and by its path."""
    objects = savings.make_objects()
    for restore in (
        lambda: kept.restore(step, **objects, position=savings.Position()),
        lambda: checkpoints.restore(folder / f"{step}" / "model", objects["model"]),
    ):
        try:
            restore()
        except errors.CheckpointError:
            continue
        raise AssertionError(f"step {step} is not listed, and loads")


def check_single(folder, expected):
    """Reads the checkpoint that is saved over."""
    found = savings.single_step(folder)
    allowed = {max(expected.done["single"], default=-1), expected.begun["single"]}
    if found not in allowed:
        raise AssertionError(f"{folder} has step {found}, expected one of {allowed}")
    if found >= 0:
        expected.found("single", found)
    return found


def phase(folder):
    """What the kill found, by what lies about."""
    names = [path.name for path in folder.rglob("*")]
    partial = [*folder.rglob("*.orbax-checkpoint-tmp")]
    if any(name.endswith(".graftree-deleted") for name in names):
        return "while deleting an old step"
    if any(name.endswith(".graftree-old") for name in names):
        return "while swapping"
    if any((path / "commit_success.txt").exists() for path in partial):
        return "before the rename"
    if partial:
        return "while writing"
    return "before swapping" if "single.graftree-new" in names else "between saves"


def check_rest(folder, steps):
    """After a run that was not killed nothing else is there."""
    wanted = {"series", "single"}
    found = {path.name for path in folder.iterdir()}
    listed = {path.name for path in (folder / "series").iterdir()}
    if found != wanted or listed != {*map(str, steps[-savings.KEEP :])}:
        raise AssertionError(f"left behind: {found - wanted} {listed}")


def one_kill(folder, number, options, rng, expected, counts):
    """Starts, kills, reads; counts in which phase it hit."""
    command = ["tests.stress.savings", folder, "--seed", f"{options.seed} {number}"]
    moment = None
    if rng.random() < options.exact:
        command += ["--before", rng.randrange(1, options.operations)]
    else:
        moment = starts.Moment("start", rng.uniform(0.0, options.longest))
    record = starts.start([command], moment)
    record.check(-9)
    expected.read(record.lines[0])
    before = record.last("kill")
    hit = phase(folder)
    counts[hit] += 1
    counts["by time" if before is None else f"before {before.split()[0]}"] += 1
    steps = check_series(folder / "series", expected)
    return steps, check_single(folder / "single", expected), hit, before


def run(options):
    """Kills so often; returns counts by phase, and what was said."""
    counts = collections.Counter()
    expected, rng = Expected(), random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for number in range(options.kills):
            steps, single, hit, before = one_kill(
                folder, number, options, rng, expected, counts
            )
            if options.verbose:
                print(number, steps, single, hit, before or "", flush=True)
        lines = []
        savings.save_on(folder, 8, rng, tell=lambda *words: lines.append(words))
        expected.read(lines)
        expected.done["series"].append(expected.begun["series"])
        check_rest(folder, check_series(folder / "series", expected))
        check_single(folder / "single", expected)
    return counts, expected


def read_options(arguments=None):
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--exact", type=float, default=0.5, help="part of the kills")
    parser.add_argument("--operations", type=int, default=400)
    parser.add_argument("--longest", type=float, default=0.5, help="seconds")
    parser.add_argument("--verbose", action="store_true")
    return parser.parse_args(arguments)


def main():
    """Kills as often as the command line says, and says what was seen."""
    options = read_options()
    counts, expected = run(options)
    done = {what: len(steps) for what, steps in expected.done.items()}
    print(f"{options.kills} kills; finished saves {done}; all of them loaded")
    for what, count in counts.most_common():
        print(f"  {count:4d}  {what}")


if __name__ == "__main__":
    sys.exit(main())
