"""One of two processes of the language-model example is killed in the middle of a run.

    python -m tests.stress.neighbours [--process 0]

The command must end within seconds, with one line; the same command must then go on and
reach the losses of a run that nothing stopped. Needs Linux, and some minutes.
"""

import argparse
import json
import os
import pathlib
import signal
import tempfile
import time

from tests import interpreters

COMMAND = (
    "--processes 2 --mesh data=2,fsdp=2 --steps 10 --every 2 --batch-size 64 "
    "--length 64 --layers 1 --width 16 --heads 4 --kv-heads 2 --hidden 32 --sample 1"
)
WITHIN = 20.0  # seconds; the command gives the others five


def start(folder):
    """Starts the command."""
    options = [*COMMAND.split(), f"--output={folder}"]
    return interpreters.start("-m", "examples.lm", *options)


def finish(folder):
    """Runs the command to its end; returns what it printed and its losses."""
    out, errors = start(folder).communicate(timeout=300)
    assert "held-out loss" in out, out + errors
    return out, json.loads((folder / "run.json").read_text())["curve"]


def kill(folder, number):
    """Kills a process after a checkpoint; returns how the command ended."""
    command = start(folder)
    for line in command.stdout:
        # A checkpoint is written while steps go on, and gets its name in the end.
        if line.startswith("step") and (folder / "checkpoints" / "2").exists():
            break
    children = pathlib.Path(f"/proc/{command.pid}/task/{command.pid}/children")
    os.kill(sorted(map(int, children.read_text().split()))[number], signal.SIGKILL)
    since = time.monotonic()
    _, errors = command.communicate(timeout=60)
    return command.returncode, errors, time.monotonic() - since


def main(arguments=None):
    """Kills one, goes on, compares."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--process", type=int, choices=(0, 1), default=1)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as made:
        whole, broken = pathlib.Path(made, "whole"), pathlib.Path(made, "broken")
        code, errors, seconds = kill(broken, options.process)
        assert code == 1 and seconds < WITHIN, (code, errors, seconds)
        assert f"process {options.process} ended (killed by SIGKILL)" in errors, errors
        assert errors.count("\n") == 1, errors
        out, curve = finish(broken)
        assert "going on after step" in out, out
        _, expected = finish(whole)
        assert curve == expected, (curve, expected)
    print(f"ended {seconds:.1f} s after the kill; the losses are equal: {curve}")


if __name__ == "__main__":
    main()
