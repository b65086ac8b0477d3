"""Hidden recompiles, control flow: what no jit is around is compiled at each call."""

import timeit

import jax
import jax.numpy as jnp
from flax import nnx

model, x = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), jnp.ones((1, 8))


def apply(model, x):
    return model(x)


def skip(model, x):
    return x


def step(i, carry):
    model, x = carry
    return model, model(x)


events = []


def note(event, seconds, **_):
    if event.endswith("backend_compile_duration"):
        events.append(event)


jax.monitoring.register_event_duration_secs_listener(note)


def compilations(call):
    """How many programs ten calls compile that follow a first one."""
    call()
    before = len(events)
    for _ in range(10):
        call()
    return len(events) - before


def cond():
    return nnx.cond(True, apply, skip, model, x)


def loop():
    return nnx.fori_loop(0, 3, step, (model, x))


print("10 more calls of cond, compilations:", compilations(cond))
print("10 more calls of fori_loop, compilations:", compilations(loop))
print(f"a call of cond: {1e3 * min(timeit.repeat(cond, number=1)):.2f} ms")
