"""Quadratic tracing: each write to a Variable walks all equations traced so far."""

import cProfile
import time

import jax.numpy as jnp
from flax import nnx


def write(cells, x):
    for cell in cells:
        x = jnp.sin(x)
        cell[...] = x


def trace(count):
    cells = nnx.List([nnx.Variable(jnp.zeros(())) for _ in range(count)])
    nnx.jit(write).trace(cells, jnp.ones(()))


def calls(count):
    profile = cProfile.Profile(builtins=False)
    profile.runcall(trace, count)
    return sum(entry.callcount for entry in profile.getstats())


for count in (100, 800):
    print(f"{count} writes, Python calls per write: {calls(count) / count:.0f}")
start = time.perf_counter()
trace(800)
seconds = time.perf_counter() - start
print(f"800 writes, time per write: {1e6 * seconds / 800:.0f} µs")
