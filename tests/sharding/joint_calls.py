"""Calls that several processes make together, and one that fails in one of them.

``python -m tests.sharding.joint_calls PLAN FOLDER --process 0 --processes 2 --port N``
is one of the processes; `run` starts them all. Each prints a line of JSON per call:
what it raised, if anything, and after how long.

The plans:

- ``refused``: each call fails in one process (the last, the first), then succeeds.
- ``raised``: the last one's program raises before a call that the others make.
- ``killed``: the last one is killed there.
- ``apart``: processes make different calls; then the same ones again.

Uses internals to break what can't be broken from outside in one process alone: its
disk, and the listing of a folder that all of them see.
"""

import argparse
import contextlib
import json
import logging
import os
import pathlib
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

import graftree as nnx
from graftree import checkpoints
from graftree.checkpoints import orbax_side, series
from graftree.sharding import collectives
from graftree.weights import layouts, saving
from tests.stress import starts

NAME = "tests.sharding.joint_calls"
DEVICES = 2  # of each process
FULL = OSError(28, "No space left")
HEARTBEAT = 10  # seconds in which JAX notices that a process was killed


class Iterator:
    """A data iterator, which may be broken."""

    def __init__(self, breaks=False):
        self.breaks = breaks

    def get_state(self):
        return {"at": object() if self.breaks else 3}

    def set_state(self, state):
        if self.breaks and state["at"] == 3:
            raise KeyError("no such position")


class Calls:
    """One call of each kind; each may fail in this process, before the others wait.

    Args:
        folder: Theirs alone, the same in all processes.
    """

    def __init__(self, folder):
        self.folder = folder
        self.mesh = jax.make_mesh((jax.device_count(),), ("data",))
        self.rows = NamedSharding(self.mesh, P("data"))
        self.kept = checkpoints.Checkpoints(folder / "run", best="loss", keep=2)
        self.number = 0
        self.step = 0

    def close(self):
        self.kept.close()

    def model(self, rows=4):
        kernel = np.zeros((rows * jax.device_count(), 2), np.float32)
        kernel = jax.make_array_from_callback(
            kernel.shape, self.rows, lambda where: kernel[where]
        )
        return nnx.Dict(up=nnx.Param(kernel), count=nnx.Variable(jnp.array(3)))

    def save(self, fails):
        self.number += 1
        model = self.model()
        if fails:
            model.wrong = nnx.Variable(np.array("text"))
        checkpoints.save(self.folder / f"model{self.number}", model)

    def save_to_disk(self, fails):
        self.number += 1
        with _broken(fails, collectives.Barriers, "together", FULL):
            checkpoints.save(self.folder / f"model{self.number}", self.model())

    def overwrite(self, fails):
        name = "whole"
        with _broken(fails, collectives.Barriers, "together", FULL):
            checkpoints.save(self.folder / name, self.model(), overwrite=True)

    def restore(self, fails):
        like = self.model(rows=5 if fails else 4)
        checkpoints.restore(self.folder / "whole", like)

    def read(self, fails):
        with _broken(fails, orbax_side, "read", OSError(5, "Input/output error")):
            checkpoints.restore(self.folder / "whole", self.model())

    def save_step(self, fails):
        self.step += 1
        model = nnx.Dict(x=nnx.Variable(np.array("text"))) if fails else self.model()
        self.kept.save(self.step, model=model, data=Iterator(), scores={"loss": 1.0})

    def save_score(self, fails):
        self.step += 1
        scores = {} if fails else {"loss": 1.0}
        self.kept.save(self.step, model=self.model(), data=Iterator(), scores=scores)

    def save_position(self, fails):
        self.step += 1
        given = {"model": self.model(), "data": Iterator(fails)}
        self.kept.save(self.step, **given, scores={"loss": 1.0})

    def save_other_scores(self, fails):
        self.step += 1
        scores = {"loss": 2.0 if fails else 1.0}
        self.kept.save(self.step, model=self.model(), data=Iterator(), scores=scores)

    def write_step(self, fails):
        self.step += 1
        with _broken(fails, collectives.Barriers, "together", FULL):
            given = {"model": self.model(), "data": Iterator()}
            self.kept.save(self.step, **given, scores={"loss": 1.0})
            self.kept.wait()

    def restore_latest(self, fails):
        model = self.model(rows=5 if fails else 4)
        assert self.kept.restore_latest(model=model, data=Iterator()) > 0

    def restore_position(self, fails):
        self.kept.restore_latest(model=self.model(), data=Iterator(fails))

    def steps(self, fails):
        wrong = PermissionError(13, "Permission denied")
        # In the others than the first one, waiting for the last save may fail.
        method = "_steps_on_disk" if collectives.is_first() else "wait"
        with _broken(fails, series.Checkpoints, method, wrong):
            self.kept.steps()

    def fetch(self, fails):
        array = self.model().up.get_value()
        if fails:
            array.delete()
        nnx.sharding.fetch({"x": array})

    def fetch_other(self, fails):
        nnx.sharding.fetch(self.model(rows=5 if fails else 4))

    def global_batch(self, fails):
        rows = np.ones((3 if fails else 4, 2))
        nnx.sharding.global_batch({"x": rows}, self.rows)

    def global_batch_of_other_size(self, fails):
        rows = np.ones((2 if fails else 4, 2))
        nnx.sharding.global_batch({"x": rows}, self.rows)

    def save_weights(self, fails):
        self.number += 1
        path = self.folder / f"{self.number}.safetensors"
        table = {"up": "none" if fails else "up", "count": "count"}
        nnx.weights.save(path, self.model(), table)

    def write_weights(self, fails):
        self.number += 1
        path = self.folder / f"{self.number}.safetensors"
        # The first one writes; the others send, and then have nothing to do.
        owner, method = layouts.Solved, "to_file"
        if collectives.is_first():
            owner, method = saving, "write"
        with _broken(fails, owner, method, FULL):
            nnx.weights.save(path, self.model(), {"up": "up", "count": "count"})


# In an order in which each finds what it reads.
NO_CALLS = {"close", "model"}
ALL = [x for x in vars(Calls) if not x.startswith("_") and x not in NO_CALLS]
# One of each kind that waits.
MAIN = "save restore save_step steps fetch global_batch save_weights".split()


@contextlib.contextmanager
def _broken(breaks, owner, name, error):
    """Has a function raise, if ``breaks``."""
    before = getattr(owner, name)

    def fail(*args, **kwargs):
        raise error

    if breaks:
        setattr(owner, name, fail)
    try:
        yield
    finally:
        setattr(owner, name, before)


def tell(case, call, *arguments):
    """Makes a call, and prints what came of it."""
    start, raised = time.monotonic(), ["", ""]
    try:
        call(*arguments)
    except Exception as error:
        notes = getattr(error, "__notes__", [])
        raised = [type(error).__name__, "\n".join([str(error), *notes])]
    seconds = time.monotonic() - start
    print(json.dumps([case, *raised, seconds]), flush=True)


def do_refused(calls, own, count, names):
    for fault in count - 1, 0:
        for name in names:
            tell(f"{name} {fault}", getattr(calls, name), own == fault)
            tell(f"{name} {fault} again", getattr(calls, name), False)


def do_raised(calls, own, count, names):
    _prepare(calls)
    if own == count - 1:
        raise ValueError("no more data")
    for name in names:
        tell(name, getattr(calls, name), False)


def do_killed(calls, own, count, names):
    _prepare(calls)
    if own == count - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for name in names:
        tell(name, getattr(calls, name), False)


def _prepare(calls):
    calls.overwrite(False)
    calls.save_step(False)
    calls.kept.wait()


def do_apart(calls, own, count, names):
    is_last = own == count - 1
    _prepare(calls)
    calls.step += is_last  # it has left out a step
    tell("other step", calls.save_step, False)
    calls.step -= is_last
    tell("other step again", calls.save_step, False)
    tell("other call", calls.fetch if is_last else calls.steps, False)
    tell("other call again", calls.steps, False)
    # Ahead of the main thread, in any order.
    thread = threading.Thread(target=lambda: [time.sleep(own), make_batches(calls)])
    thread.start()
    tell("beside a thread", calls.save_step, False)
    thread.join()
    if is_last:
        return  # its program ends; it has no error
    tell("ended", calls.steps, False)


def make_batches(calls):
    for _ in range(3):
        calls.global_batch(False)
    print(json.dumps(["thread", "", "", 0]), flush=True)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("plan", choices=["refused", "raised", "killed", "apart"])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--calls", default="")
    for name in "process", "processes", "port":
        parser.add_argument(f"--{name}", type=int)
    options = parser.parse_args(arguments)
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    logging.basicConfig()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{options.port}",
        options.processes,
        options.process,
        heartbeat_timeout_seconds=HEARTBEAT,
        shutdown_timeout_seconds=60,
    )
    collectives.PATIENCE = 2.0
    calls = Calls(options.folder)
    names = options.calls.split(",") if options.calls else ALL
    do = globals()[f"do_{options.plan}"]
    do(calls, options.process, options.processes, names)
    calls.close()


def run(plan, folder, count, names=()):
    """Starts the processes; returns the record of what they said, by process.

    Returns:
        For each process its calls: the type and text of what they raised, and seconds;
        and the record of the start.
    """
    port = starts.free_port()
    record = starts.start(
        [
            [NAME, plan, folder, f"--calls={','.join(names)}"]
            + [f"--process={i}", f"--processes={count}", f"--port={port}"]
            for i in range(count)
        ]
    )
    said = []
    for lines in record.lines:
        texts = [" ".join(line) for line in lines]
        rows = [json.loads(text) for text in texts if text.startswith('["')]
        said.append({case: rest for case, *rest in rows})
    return said, record


if __name__ == "__main__":
    main(sys.argv[1:])
