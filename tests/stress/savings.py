"""A program that saves without end: ``python -m tests.stress.savings DIRECTORY``.

It saves into a series, with and without waiting, and over a single checkpoint. All
values are known from the step, so who reads can see whether a load is right. It prints
what it does, and what for certain is on disk:

    start 7 6          the latest step of the series, and that of the single checkpoint
    begin series 8
    done series 8
    begin single 7

With ``--before N`` it kills itself before its Nth operation on files, and says before
which, so that also moments come that last microseconds:

    kill os.rename /tmp/d/series/8.orbax-checkpoint-tmp
"""

import argparse
import os
import random
import signal
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import graftree as nnx
from graftree import checkpoints, errors
from tests.stress.starts import tell

KEEP = 2
SIZE = 200_000

# The operations of Python; TensorStore has its own, in between.
OPERATIONS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "open")


def make_objects():
    """What is saved: layers, an optimizer, streams."""
    model = nnx.Dict(
        layers=nnx.List([nnx.Param(jnp.zeros((3, 4))), nnx.Rngs(0)]),
        wide=nnx.Param(jnp.zeros(SIZE)),
    )
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    return {"model": model, "optimizer": optimizer}


class Position:
    """Stands for a data iterator."""

    def __init__(self):
        self.state = {"position": -1, "seen": []}

    def get_state(self):
        """The dict itself, which goes on changing."""
        return self.state

    def set_state(self, state):
        """Takes the place of what was there."""
        self.state = state


def _values(step, number, shape):
    return np.random.default_rng([step, number]).random(shape, np.float32)


def _leaves(objects):
    """The Variables in order, each with its number."""
    return enumerate(leaf for _, leaf in nnx.to_flat_state(nnx.state(objects)))


def _known(leaf, step, number):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key(step * 100 + number)
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        return jnp.full(leaf.shape, step * 100 + number, leaf.dtype)
    return jnp.asarray(_values(step, number, leaf.shape))


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
    leaves = [*_leaves(objects)]
    step = int(objects["optimizer"].step[...]) // 100
    for number, leaf in leaves:
        found, known = leaf.get_value(), _known(leaf, step, number)
        if jax.dtypes.issubdtype(found.dtype, jax.dtypes.prng_key):
            found, known = jax.random.key_data(found), jax.random.key_data(known)
        if not np.array_equal(found, known):
            raise AssertionError(f"leaf {number} has not the values of step {step}")
    return step


def single_step(folder):
    """The step of the single checkpoint; -1 if there is none."""
    try:
        read = checkpoints.restore(folder, make_objects())
    except errors.CheckpointError as error:
        if "There is no checkpoint" not in str(error):
            raise
        return -1
    return step_of(read)


def kill_before(number):
    """Has this process kill itself before its Nth operation on files."""
    left = number

    def hook(event, arguments):
        nonlocal left
        if event not in OPERATIONS or not _changes(event, arguments):
            return
        left -= 1
        if left == 0:
            tell("kill", event, arguments[0])
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def _changes(event, arguments):
    """Whether it is about a checkpoint, and writes."""
    if event == "open":
        return isinstance(arguments[2], int) and arguments[2] & (
            os.O_WRONLY | os.O_RDWR
        )
    return isinstance(arguments[0], (str, os.PathLike))


def save_on(folder, rounds, rng, before=0, tell=tell):
    """Saves until it is killed, or for a number of rounds."""
    series, single = os.path.join(folder, "series"), os.path.join(folder, "single")
    objects, position = make_objects(), Position()
    with checkpoints.Checkpoints(series, keep=KEEP) as kept:
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
            kept.save(step, **objects, position=position)
            if waiting is not None:
                tell("done", "series", waiting)
            waiting = step
            if rng.random() < 0.5:
                kept.wait()
                tell("done", "series", step)
                waiting = None
    tell("end")


def main():
    """Saves, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--before", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    save_on(options.directory, options.rounds, rng, options.before)


if __name__ == "__main__":
    sys.exit(main())
