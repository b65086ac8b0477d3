"""Decoding bound by the host: each call takes the model apart in Python."""

import cProfile
import timeit

import jax
import jax.numpy as jnp
from flax import nnx

x = jnp.ones((1, 8))
step = nnx.jit(lambda model, x: model(x))


def make(depth):
    return nnx.Sequential(*[nnx.Linear(8, 8, rngs=nnx.Rngs(i)) for i in range(depth)])


def calls(model):
    for _ in range(3):  # compiles
        step(model, x)
    profile = cProfile.Profile(builtins=False)
    profile.runcall(step, model, x)
    return sum(entry.callcount for entry in profile.getstats())


def microseconds(function, model):
    times = timeit.repeat(lambda: function(model, x).block_until_ready(), number=20)
    return 1e6 / 20 * min(times)


for depth in (10, 50):
    print(f"nnx.jit of {depth} layers, Python calls: {calls(make(depth))}")
print(f"nnx.jit of 50 layers, time: {microseconds(step, make(50)):.0f} µs")
graphdef, state = nnx.split(make(50))
by_state = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))
print(f"jax.jit of their State, time: {microseconds(by_state, state):.0f} µs")
