"""A run with a log, killed before each of its operations on files, and in writes.

``python -m tests.stress.log_kills`` does it for each kind of file, and prints how many
kills there were; a number lets it do only every so manieth. The run writes a row for
each step and saves every third step, and begins again after each kill, which comes in
its first or a later start. After each one

- all rows of the saved step, and whole rows only, can be read;
- a start that is not killed ends with the file of a run that never was, byte by byte.
"""

import functools
import json
import os
import pathlib
import random
import sys
import tempfile

import graftree as nnx
from tests.stress import starts

WATCHED = ("open", "os.rename", "os.remove", "os.mkdir", "os.truncate")
LAST, EVERY = 8, 3
KINDS = ("csv", "jsonl")


def metrics_of(step):
    """Two metrics come later than the first, so that tables get columns."""
    late = {"late": step / 7} if step > 2 else {}
    return {"loss": 1 / step, **late, **({"later": float("nan")} if step > 6 else {})}


def train(folder, kind):
    """Goes on after the saved step, or begins; its checkpoint is one small file."""
    saved = folder / "saved"
    log = nnx.training.RunLog(folder / f"run.{kind}", resume=True)
    state = json.loads(saved.read_text()) if saved.exists() else {"step": 0}
    if "log" in state:
        log.set_state(state["log"])
    for step in range(state["step"] + 1, LAST + 1):
        log.write(step, metrics_of(step))
        if step % EVERY == 0:
            text = json.dumps({"step": step, "log": log.get_state()})
            (folder / "new").write_text(text)
            os.replace(folder / "new", saved)
    log.close()


def check_rows(folder, kind):
    """Reads what a kill has left: the rows to the saved step, and maybe later ones."""
    saved, path = folder / "saved", folder / f"run.{kind}"
    step = json.loads(saved.read_text())["step"] if saved.exists() else 0
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    if kind == "csv":
        steps = [int(line.partition(b",")[0]) for line in lines[1:]]
    else:
        steps = [json.loads(line)["step"] for line in lines]
    assert steps == [*range(1, len(steps) + 1)] and len(steps) >= step, (steps, step)


def kills(kind, every=1):
    """Kills a run at each operation, and goes on; returns how many kills there were."""
    with tempfile.TemporaryDirectory() as name:
        unbroken = pathlib.Path(name)
        train(unbroken, kind)
        expected = (unbroken / f"run.{kind}").read_bytes()
    killed_at = functools.partial(starts.killed_at, watched=WATCHED, in_writes=True)
    count, rng = 0, random.Random(kind)
    for number in range(1, 1000, every):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            run = functools.partial(train, folder, kind)
            is_killed = killed_at(number, run)
            count += is_killed
            check_rows(folder, kind)
            while is_killed and rng.random() < 0.5:  # again, in what a kill has left
                count += killed_at(rng.randrange(1, number + 9), run)
                check_rows(folder, kind)
            run()
            assert (folder / f"run.{kind}").read_bytes() == expected, number
            assert {*os.listdir(folder)} <= {"saved", "new", f"run.{kind}"}
            if not is_killed:
                return count
    raise AssertionError("it never ends")


def main(every=1):
    """Prints how often each kind of file was killed."""
    for kind in KINDS:
        print(kills(kind, every), kind)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
