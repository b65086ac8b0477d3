"""Counts what a reader has to follow: Python calls, functions and files of one call.

``python -m benchmarks.reading`` prints a line for each of a few common calls: how many
calls of functions of the library it makes, how many functions these are, and in how
many files they stand. JAX's own functions and the user's don't count.
"""

import functools
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import graftree as nnx

PACKAGE = str(pathlib.Path(nnx.__file__).parent)


class MLP(nnx.Module):
    """Two layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.second = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits."""
        return self.second(nnx.relu(self.first(x)))


def followed(call: Callable[[], Any]) -> tuple[int, int, int]:
    """The calls, functions and files of the package that a call goes through."""
    calls: list[tuple[str, str, int]] = []

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            calls.append((code.co_filename, code.co_name, code.co_firstlineno))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(calls), len(set(calls)), len({file for file, _, _ in calls})


def main() -> None:
    """Prints the table."""
    x, y = jnp.ones((3, 4)), jnp.ones((3, 2))

    def loss(model: MLP) -> jax.Array:
        return ((model(x) - y) ** 2).mean()

    @nnx.jit
    def step(model: MLP, optimizer: nnx.Optimizer) -> jax.Array:
        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    @nnx.vmap(in_axes=0, out_axes=0)
    def stack(key: jax.Array) -> nnx.Linear:
        return nnx.Linear(4, 4, rngs=nnx.Rngs(key))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def through(x: jax.Array, layer: nnx.Linear) -> jax.Array:
        return layer(x)

    model = MLP(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    layers = stack(jax.random.split(jax.random.key(0), 3))
    linear, rngs = model.first, nnx.Rngs(0)
    graphdef, state = nnx.split(MLP(rngs))
    run_step = functools.partial(step, model, optimizer)
    rows: dict[str, Callable[[], Any]] = {
        "jit train step, 1st call": run_step,
        "jit train step, 2nd call": run_step,
        "jit train step, 3rd call": run_step,
        "value_and_grad, eager": lambda: nnx.value_and_grad(loss)(model),
        "scan over 3 layers": lambda: through(x, layers),
        "split, 1st": lambda: nnx.split(model),
        "split, 2nd": lambda: nnx.split(model),
        "split, 3rd": lambda: nnx.split(model),
        "merge": lambda: nnx.merge(graphdef, state),
        "Linear.__call__": lambda: linear(x),
        "Linear.__init__": lambda: nnx.Linear(4, 8, rngs=rngs),
    }
    print(f"{'':28}{'calls':>8}{'functions':>11}{'files':>7}")
    for name, call in rows.items():
        calls, functions, files = followed(call)
        print(f"{name:28}{calls:8,}{functions:11}{files:7}")


if __name__ == "__main__":
    main()
