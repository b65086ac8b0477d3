"""Runs one program and prints its losses and times as a line of JSON.

``python measure.py NAME`` runs it on Flax, ``python -m graftree.dropin measure.py
NAME`` on Graftree: this file does not know which.
"""

import importlib
import itertools
import json
import statistics
import sys
import time

import jax
from flax import nnx


def measure(name: str) -> dict[str, object]:
    """Runs a program: its losses, and the seconds that its parts took."""
    program = importlib.import_module(name)
    start = time.perf_counter()
    built = jax.block_until_ready(program.build())
    times = [time.perf_counter()]
    losses = []
    for loss in program.train(*built):
        losses.append(float(loss))
        times.append(time.perf_counter())
    steps = [after - before for before, after in itertools.pairwise(times)]
    step = statistics.median(steps[1:])
    return {
        "library": nnx.Module.__module__.partition(".")[0],
        "losses": losses,
        "goal": program.GOAL,
        "build": times[0] - start,
        "first": steps[0] - step,  # what the first step took for tracing and compiling
        "step": step,
    }


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
