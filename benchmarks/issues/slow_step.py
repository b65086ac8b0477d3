"""One step in a hundred is slow: the garbage collector runs, as steps allocate much."""

import gc
import time

import jax.numpy as jnp
import optax
from flax import nnx

x = jnp.ones((1, 8))
model = nnx.Sequential(*[nnx.Linear(8, 8, rngs=nnx.Rngs(i)) for i in range(50)])
optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


@nnx.jit
def train_step(model, optimizer, x):
    grads = nnx.grad(lambda model: (model(x) ** 2).mean())(model)
    optimizer.update(model, grads)


def run(steps):
    for _ in range(steps):
        start = time.perf_counter()
        train_step(model, optimizer, x)
        yield 1e3 * (time.perf_counter() - start)


def collections():
    return sum(generation["collections"] for generation in gc.get_stats())


list(run(3))  # compiles
gc.collect()
before = collections()
times = sorted(run(300))
print("runs of the collector in 300 steps:", collections() - before)
print(f"median step: {times[150]:.2f} ms")
print(f"slowest of 300 steps: {times[-1]:.2f} ms")
