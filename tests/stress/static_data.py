"""JAX alone, five threads: ``python -m tests.stress.static_data --seconds 30``.

The process dies of a segmentation fault, mostly within seconds (JAX 0.12.0.1, Python
3.12.1 and 3.13.0). A jitted function compares the static data of pytree nodes inside
its cache in C++. Here the comparison runs Python, so another thread may take its turn,
and add to the same cache under the feet of the first. `signatures.Signatures` sees
to it that what JAX compares for us never runs Python.
"""

import argparse
import dataclasses
import functools
import os
import random
import sys
import threading
import time

# Threads are to meet in the cache, not in the compiler.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import jax
import jax.numpy as jnp

from tests import threads

THREADS, CALLS, TAGS = 5, 300, 30


class Tag:
    """Static data that Python compares."""

    def __init__(self, number):
        self.number = number

    def __hash__(self):
        return hash(self.number)

    def __eq__(self, other):
        # Long enough for another thread to take its turn now and then.
        return any(other.number == self.number for _ in range(20))


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["tag"]
)
@dataclasses.dataclass
class Box:
    """An array with a tag."""

    array: jax.Array
    tag: Tag


def run_round(number):
    """All threads call one new function, for boxes with many tags."""
    function, array = jax.jit(lambda box: box.array), jnp.ones(())
    start = threading.Barrier(THREADS)

    def work(name):
        rng = random.Random(f"{number} {name}")
        start.wait()
        for _ in range(CALLS):
            function(Box(array, Tag(rng.randrange(TAGS))))

    threads.run_in_threads(*[functools.partial(work, i) for i in range(THREADS)])


def main():
    """Reads the command line, and says how far it came."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=30.0)
    end, number = time.monotonic() + parser.parse_args().seconds, 0
    # Threads take turns far more often than by default.
    sys.setswitchinterval(1e-5)
    while time.monotonic() < end:
        run_round(number)
        number += 1
    print(f"{number} rounds, no crash")


if __name__ == "__main__":
    main()
