"""Five threads at once, for a while: ``python -m tests.stress.threads --seconds 60``.

In each round new functions, compiled in all three modes, are called for the first time
by all threads at the same moment. Each thread has a model of its own, of which it knows
what every call gives; and there is one model for all, whose values and structure all
change while others read it. Beside that, each differentiates and branches over
functions made a moment ago.

Nothing may crash, and nothing that a thread has for itself may be wrong. A model that
several threads change without a lock promises no numbers, only that each error is one
that Python or the library raises on purpose.
"""

import argparse
import collections
import functools
import os
import random
import sys
import threading
import time

# Threads are to meet in calls, not in the compiler.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import jax
import jax.numpy as jnp

import graftree as nnx
from tests import modes, threads

THREADS = 5
MODES = [*modes.BY_NAME.values()]

# What may happen to the model of all threads: another changes it under a call.
TOLERATED = (KeyError, AttributeError, RuntimeError, ValueError)


class Net(nnx.Module):
    """A model of little to compute, and of many structures: one per ``kind``."""

    def __init__(self, tag):
        self.weight = nnx.Param(jnp.ones(()), tag=tag)
        self.calls = nnx.BatchStat(jnp.zeros(()))
        self.inner = nnx.Dict(scale=nnx.Param(jnp.full((), 2.0)))
        self.kind = 0

    def __call__(self, x):
        self.calls[...] += 1
        return self.weight[...] * x + self.kind


class Round:
    """New functions, and a new model for all threads."""

    def __init__(self, number):
        self.shared = Net(f"shared {number % 3}")
        self.steps = [nnx.jit(lambda m, x: m(x), **mode) for mode in MODES]
        # What JAX compares most: in tree mode it hashes no static attributes.
        self.peek = nnx.jit(lambda m: m.weight[...], **MODES[number % 4 % 3])
        self.barrier = threading.Barrier(THREADS)

    def run(self, rng, actions, met):
        """What one thread does; it counts in ``met`` what it tolerated."""
        own, called = Net("own"), 0
        self.barrier.wait()
        for _ in range(5 * actions):
            own.kind = rng.randrange(30)
            self.peek(own)
        for step in self.steps:
            self.barrier.wait()
            _expect(step(own, 1.0), 1.0 + own.kind)
            called += 1
        for _ in range(actions):
            called += self._use_own(own, called, rng)
            try:
                self._use_shared(rng)
            except TOLERATED as error:
                met[f"{type(error).__name__}: {str(error)[:60]}"] += 1

    def _use_own(self, own, called, rng):
        """Calls that must give what they give in one thread; tells how many."""
        action = rng.choices(range(6), (8, 8, 8, 8, 1, 1))[0]
        by = float(rng.randrange(4))
        if action < 3:
            _expect(self.steps[action](own, by), by + own.kind)
            _expect(own.calls[...], called + 1.0)
            return 1
        if action == 3:
            own.kind = rng.randrange(3)
        elif action == 4:
            loss = nnx.grad(lambda m: m.weight[...] * by, **rng.choice(MODES))
            _expect(nnx.state(loss(own), nnx.Param)["weight"][...], by)
        else:
            up, down = (lambda m: m.inner.scale[...] * by), (lambda m: -by)
            _expect(nnx.cond(by > 1, up, down, own), 2 * by if by > 1 else -by)
        return 0

    def _use_shared(self, rng):
        shared = self.shared
        action = rng.choices(range(8), (8, 4, 4, 2, 1, 1, 2, 1))[0]
        if action < 3:
            self.steps[action](shared, 1.0)
        elif action == 3:
            shared.kind = rng.randrange(3)
        elif action == 4:
            shared.extra = nnx.Param(jnp.zeros(()))
        elif action == 5:
            del shared.extra
        elif action == 6:
            shared.weight[...] = float(rng.randrange(3))
        else:
            nnx.merge(*nnx.split(shared))


def _expect(found, wanted):
    far = abs(float(found) - wanted)
    assert far <= 1e-3 * max(1.0, abs(wanted)), f"got {found}, wanted {wanted}"


def run(rounds, seconds, seed, actions=40):
    """Runs rounds until their number or the time is reached.

    Returns:
        How many there were, and what was tolerated, with how often.
    """
    met, end, number = collections.Counter(), time.monotonic() + seconds, 0
    while number < rounds and time.monotonic() < end:
        _run_round(Round(number), f"{seed} {number}", actions, met)
        number += 1
    return number, met


def _run_round(one, seed, actions, met):
    def work(name):
        try:
            one.run(random.Random(f"{seed} {name}"), actions, met)
        except BaseException:
            one.barrier.abort()
            raise

    threads.run_in_threads(*[functools.partial(work, i) for i in range(THREADS)])


def main():
    """Reads the command line, and says what was seen."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    # Threads take turns far more often than by default.
    sys.setswitchinterval(1e-5)
    number, met = run(options.rounds, options.seconds, options.seed)
    print(f"{number} rounds, Python {sys.version.split()[0]}, JAX {jax.__version__}")
    for what, count in met.most_common():
        print(f"  {count:6d}  {what}")


if __name__ == "__main__":
    main()
