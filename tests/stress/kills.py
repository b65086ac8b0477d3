"""Saving, killed: ``python -m tests.stress.kills --kills 50 --seed 0``.

With ``--save DIRECTORY`` a process saves without end, into a series, with and without
waiting, and over a single checkpoint. All values are known from the step, so who reads
can see whether a load is right. It prints what it does, and what for certain is on
disk:

    start 7 6          the latest step of the series, and that of the single checkpoint
    begin series 8
    done series 8
    begin single 7

With ``--before N`` it kills itself before its Nth operation on files, and says before
which, so that also moments come that last microseconds:

    kill os.rename /tmp/d/series/8.orbax-checkpoint-tmp

Each process goes on where the last one was killed: that way, or at a random time by
SIGKILL. After each kill the process that started them reads what is on disk:

- What was reported as finished loads, with the right values, unless newer steps have
  taken its place: of a series the two newest steps and the best one, and the single
  checkpoint. The best one is the best of all that were ever finished; many scores are
  equal, or NaN.
- What else the API lists loads with the right values too; what it doesn't list gives an
  error.

At the end it saves some more itself, undisturbed; then nothing may be left of the
others.
"""

import argparse
import collections
import functools
import math
import os
import pathlib
import random
import signal
import sys
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # also of the processes that it starts

import jax
import jax.numpy as jnp
import numpy as np
import optax

import graftree as nnx
from graftree import checkpoints, errors
from tests.checkpoints import saved_objects
from tests.stress import starts

KEEP = 2
BEST = "loss"
SIZE = 200_000

# The operations of Python; TensorStore has its own, in between.
OPERATIONS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "open")


# ------------------------------------------------------------------- what is saved


def make_objects():
    """What is saved: layers, an optimizer, streams."""
    model = nnx.Dict(
        layers=nnx.List([nnx.Param(jnp.zeros((3, 4))), nnx.Rngs(0)]),
        wide=nnx.Param(jnp.zeros(SIZE)),
    )
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    return {"model": model, "optimizer": optimizer}


class Position(saved_objects.Iterator):
    """Its state is a dict that goes on changing."""

    def __init__(self):
        super().__init__({"position": -1, "seen": []})


def _known(leaf, step, number):
    """What a step has in a Variable, from their numbers."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key(step * 100 + number)
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        return jnp.full(leaf.shape, step * 100 + number, leaf.dtype)
    numbers = np.random.default_rng([step, number])
    return jnp.asarray(numbers.random(leaf.shape, np.float32))


def _leaves(objects):
    return enumerate(leaf for _, leaf in nnx.to_flat_state(nnx.state(objects)))


def fill(objects, position, step):
    """Writes the values of a step, and deletes the arrays that were there."""
    for number, leaf in _leaves(objects):
        before = leaf.get_value()
        leaf.set_value(_known(leaf, step, number))
        if isinstance(before, jax.Array):
            before.delete()
    position.state["position"] = step
    position.state["seen"].append(step)


def step_of(objects):
    """The step whose values these are; raises if they are no step's."""
    step = int(objects["optimizer"].step[...]) // 100
    for number, leaf in _leaves(objects):
        found, known = leaf.get_value(), _known(leaf, step, number)
        if jax.dtypes.issubdtype(found.dtype, jax.dtypes.prng_key):
            found, known = jax.random.key_data(found), jax.random.key_data(known)
        assert np.array_equal(found, known), f"leaf {number} is not of step {step}"
    return step


def score_of(step):
    """The score of a step: NaN, or one of a few numbers, so that many are equal."""
    return float(np.random.default_rng([step, 7]).choice([math.nan, *range(30)]))


def best_of(steps, mode):
    """The step with the best score, of equal ones the first; `None` if all are NaN."""
    numbers = [(score_of(step), step) for step in sorted(steps)]
    scored = [pair for pair in numbers if not math.isnan(pair[0])]
    sign = {"min": 1, "max": -1}[mode]
    return min(scored, key=lambda pair: sign * pair[0], default=(0.0, None))[1]


def series_at(folder, mode):
    """A series that keeps the newest steps and the best one."""
    return checkpoints.Checkpoints(folder, keep=KEEP, best=BEST, mode=mode)


def single_step(folder):
    """The step of the single checkpoint; -1 if there is none."""
    try:
        read = checkpoints.restore(folder, make_objects())
    except errors.CheckpointError as error:
        if "There is no checkpoint" not in str(error):
            raise
        return -1
    return step_of(read)


# ---------------------------------------------------------------- the one that saves


def kill_before(number):
    """Has this process kill itself before its Nth operation on files."""
    left = number

    def hook(event, arguments):
        nonlocal left
        if event in OPERATIONS and _changes(event, arguments):
            left -= 1
            if left == 0:
                starts.tell("kill", event, arguments[0])
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def _changes(event, arguments):
    """Whether it is about a checkpoint, and writes."""
    if event != "open":
        return isinstance(arguments[0], (str, os.PathLike))
    flags = arguments[2]
    return isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)


def save_on(folder, rounds, rng, mode, before=0, tell=starts.tell):
    """Saves until it is killed, or for a number of rounds."""
    series, single = os.path.join(folder, "series"), os.path.join(folder, "single")
    objects, position = make_objects(), Position()
    with series_at(series, mode) as kept:
        latest = kept.restore_latest(**objects, position=position)
        if latest is not None:
            assert step_of(objects) == latest == position.state["position"]
        step, other = (-1 if latest is None else latest), single_step(single)
        tell("start", step, other)
        if before:
            kill_before(before)
        waiting = None
        for _ in range(rounds):
            if rng.random() < 0.4:
                other += 1
                fill(objects, position, other)
                tell("begin", "single", other)
                checkpoints.save(single, objects, overwrite=True)
                tell("done", "single", other)
                continue
            step += 1
            fill(objects, position, step)
            tell("begin", "series", step)
            scores = {BEST: score_of(step)}
            kept.save(step, scores=scores, **objects, position=position)
            if waiting is not None:
                tell("done", "series", waiting)
            waiting = step
            if rng.random() < 0.5:
                kept.wait()
                tell("done", "series", step)
                waiting = None
    tell("end")


# ------------------------------------------------------------- the one that reads it


class Expected:
    """What the processes so far have said."""

    def __init__(self):
        self.begun = {"series": -1, "single": -1}
        self.done = {"series": set(), "single": set()}

    def read(self, lines):
        """Takes in the lines of one start."""
        for word, *rest in lines:
            if word == "begin":
                self.begun[rest[0]] = int(rest[1])
            elif word == "done":
                self.done[rest[0]].add(int(rest[1]))


def check_series(folder, expected, mode):
    """Reads a series as a new process would; returns its steps."""
    begun, done = expected.begun["series"], expected.done["series"]
    with series_at(folder, mode) as kept:
        steps = kept.steps()
        best = best_of(done | {*steps}, mode)
        assert kept.best_step() == best, f"{kept.best_step()} of {steps}, not {best}"
        newest = max([*steps, *done], default=-1)
        needed = {step for step in (newest - 1, newest) if step in done}
        told = f"{steps} on disk; done {done}, begun {begun}"
        assert needed <= {*steps} and newest <= begun, told
        for step in steps:
            check_step(functools.partial(kept.restore, step), step)
        if steps:
            check_step(kept.restore_latest, steps[-1])
        if best is not None:
            check_step(kept.restore_best, best)
        if begun not in steps:
            check_absent(kept, folder, begun)
    done |= {*steps}
    return steps


def check_step(restore, step):
    """Restores a step, and compares each value."""
    objects, position = make_objects(), Position()
    restore(**objects, position=position)
    found = step_of(objects)
    told = f"step {step} has the values of {found}, {position.state}"
    assert found == step == position.state["position"], told
    assert position.state["seen"][-1] == step, told


def check_absent(kept, folder, step):
    """What was not finished gives an error, by its step and by its path."""
    objects = make_objects()
    for restore in (
        lambda: kept.restore(step, **objects, position=Position()),
        lambda: checkpoints.restore(folder / f"{step}" / "model", objects["model"]),
    ):
        try:
            restore()
        except errors.CheckpointError:
            continue
        raise AssertionError(f"step {step} is not listed, and loads")


def check_single(folder, expected):
    """Reads the checkpoint that is saved over."""
    found, done = single_step(folder), expected.done["single"]
    allowed = {max(done, default=-1), expected.begun["single"]}
    assert found in allowed, f"{folder} has step {found}, expected one of {allowed}"
    if found >= 0:
        done.add(found)
    return found


def phase(folder):
    """What the kill found, by what lies about."""
    for pattern, found in PHASES.items():
        if any(folder.rglob(pattern)):
            return found
    return "between saves"


PHASES = {
    "*.graftree-deleted": "while deleting an old step",
    "*.graftree-old": "while swapping",
    "*.orbax-checkpoint-tmp/commit_success.txt": "before the rename",
    "*.orbax-checkpoint-tmp": "while writing",
    "single.graftree-new": "before swapping",
}


def check_rest(folder, steps, mode):
    """After a run that was not killed nothing else is there."""
    found = {path.name for path in folder.iterdir()}
    listed = {path.name for path in (folder / "series").iterdir()}
    kept = {*steps[-KEEP:], best_of(steps, mode)} - {None}
    wanted = {"series", "single"}, {*map(str, kept)}
    assert (found, listed) == wanted, f"left behind: {found} {listed}"


def one_kill(folder, number, options, rng, expected, counts):
    """Starts, kills, reads; counts in which phase it hit."""
    seed = f"--seed={options.seed} {number}"
    command = ["tests.stress.kills", "--save", folder, seed, f"--mode={options.mode}"]
    moment = None
    if rng.random() < 0.5:
        command.append(f"--before={rng.randrange(1, 400)}")
    else:
        moment = starts.Moment("start", rng.uniform(0.0, 0.5))
    record = starts.start([command], moment)
    record.check(-9)
    expected.read(record.lines[0])
    before = record.last("kill")
    hit = phase(folder)
    counts[hit] += 1
    counts["by time" if before is None else f"before {before.split()[0]}"] += 1
    steps = check_series(folder / "series", expected, options.mode)
    counts["the best step was older than the newest ones"] += len(steps) > KEEP
    return steps, check_single(folder / "single", expected), hit, before


def run(options):
    """Kills so often; returns counts by phase, and what was said."""
    counts = collections.Counter()
    expected, rng = Expected(), random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for number in range(options.kills):
            seen = one_kill(folder, number, options, rng, expected, counts)
            if options.verbose:
                print(number, *seen, flush=True)
        lines = []
        save_on(folder, 8, rng, options.mode, tell=lambda *words: lines.append(words))
        expected.read(lines)
        expected.done["series"].add(expected.begun["series"])
        steps = check_series(folder / "series", expected, options.mode)
        check_rest(folder, steps, options.mode)
        check_single(folder / "single", expected)
    return counts, expected


def read_options(arguments=None):
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--mode", default="min", help="which score is the best: max")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--save", metavar="DIRECTORY", help="saves until it is killed")
    parser.add_argument("--before", type=int, default=0, help="kills itself")
    return parser.parse_args(arguments)


def main():
    """Kills as often as the command line says, and says what was seen."""
    options = read_options()
    if options.save:
        rng = random.Random(options.seed)
        save_on(options.save, 1000, rng, options.mode, options.before)
        return
    counts, expected = run(options)
    done = {what: len(steps) for what, steps in expected.done.items()}
    print(f"{options.kills} kills; finished saves {done}; all of them loaded")
    for what, count in counts.most_common():
        print(f"  {count:4d}  {what}")


if __name__ == "__main__":
    main()
