"""Hidden recompiles, control flow: what no jit is around is traced at each call."""

import cProfile
import timeit

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


def runs(function, call):
    profile = cProfile.Profile(builtins=False)
    for _ in range(10):
        profile.runcall(call)
    return sum(e.callcount for e in profile.getstats() if e.code is function.__code__)


def cond():
    return nnx.cond(True, apply, skip, model, x)


def loop():
    return nnx.fori_loop(0, 3, step, (model, x))


print("10 calls of cond, traces of the branch:", runs(apply, cond))
print("10 calls of fori_loop, traces of the step:", runs(step, loop))
print(f"a call of cond: {1e3 * min(timeit.repeat(cond, number=1)):.2f} ms")
