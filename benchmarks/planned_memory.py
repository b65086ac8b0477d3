"""What XLA plans for a compiled program: bytes of arguments, outputs and temporaries.

These are exact and do not depend on the machine's load, so that a library can be held
to the program that one writes by hand. There are five of that: a train step, the same
with donated arguments, and the gradient of layers that are scanned, scanned and
rematerialized, and scanned in groups. The layers are residual MLPs, all in one stack.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import perceptrons, steps

WIDTH = 64
BATCH = 32
DEPTH = 12
GROUPS = 3
PARTS = {
    "arguments": "argument_size_in_bytes",
    "outputs": "output_size_in_bytes",
    "temporaries": "temp_size_in_bytes",
}
PROGRAMS = (
    "train step",
    "donated train step",
    "scan over layers",
    "scan with remat",
    "nested scan",
)


def raw(program: str, part: str) -> Callable[[], int]:
    """The bytes of a part of a program in plain JAX."""
    return _read(functools.partial(_raw, program), part)


def nnx(nnx: Any, program: str, part: str, **mode: bool) -> Callable[[], int]:
    """The bytes for Graftree or Flax NNX, in one of the three modes."""
    return _read(functools.partial(_nnx, nnx, program, **mode), part)


def _read(compiled: Callable[[], Any], part: str) -> Callable[[], int]:
    return lambda: getattr(compiled().memory_analysis(), PARTS[part])


def _inputs() -> jax.Array:
    return jnp.linspace(-1, 1, BATCH * WIDTH).reshape(BATCH, WIDTH)


# ---------------------------------------------------------------------------- raw JAX


@functools.cache
def _raw(program: str) -> Any:
    if "train" in program:
        params = perceptrons.parameters(DEPTH, WIDTH)
        batch, donate = perceptrons.batch(WIDTH), "donated" in program
        step = steps.raw(perceptrons.loss, params, batch, donate=donate)
        return step.lower().compile()
    stack = jax.eval_shape(parameters)

    def loss(params, x):
        return jnp.sum(_raw_forward(program, params, x) ** 2)

    return jax.jit(jax.value_and_grad(loss)).lower(stack, _inputs()).compile()


def parameters() -> dict[str, jax.Array]:
    """The parameters of the stack."""
    up, down = jax.random.split(jax.random.key(0))
    return {
        "up": jax.random.normal(up, (DEPTH, WIDTH, 4 * WIDTH)) * 0.1,
        "down": jax.random.normal(down, (DEPTH, 4 * WIDTH, WIDTH)) * 0.1,
    }


def _raw_forward(program: str, params: Any, x: jax.Array) -> jax.Array:
    def layer(x, params):
        return x + jax.nn.gelu(x @ params["up"]) @ params["down"], None

    if program == "scan with remat":
        layer = jax.checkpoint(layer)
    if program != "nested scan":
        return jax.lax.scan(layer, x, params)[0]
    groups = jax.tree.map(lambda p: p.reshape(GROUPS, -1, *p.shape[1:]), params)
    return jax.lax.scan(lambda x, group: jax.lax.scan(layer, x, group), x, groups)[0]


# ----------------------------------------------------------------- Graftree, Flax NNX


@functools.cache
def _nnx(nnx: Any, program: str, **mode: bool) -> Any:
    if "train" in program:
        model = perceptrons.nnx_model(nnx, DEPTH, WIDTH)
        batch, donate = perceptrons.batch(WIDTH), "donated" in program
        loss = perceptrons.nnx_loss
        step = steps.nnx(nnx, loss, model, batch, donate=donate, **mode)
        return step.lower().compile()
    stack = nnx_stack(nnx, GROUPS if program == "nested scan" else None, **mode)

    def loss(stack, x):
        return jnp.sum(_nnx_forward(nnx, program, stack, x, **mode) ** 2)

    gradient = nnx.value_and_grad(loss, **mode)
    step = nnx.jit(lambda stack, x: gradient(stack, x), **mode)
    return step.lower(stack, _inputs()).compile()


@functools.cache
def _nnx_class(nnx: Any) -> type:
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(WIDTH, 4 * WIDTH, use_bias=False, rngs=rngs)
            self.down = nnx.Linear(4 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

        def __call__(self, x):
            return x + self.down(nnx.gelu(self.up(x)))

    return Layer


def nnx_stack(nnx: Any, groups: int | None = None, **mode: bool) -> Any:
    """All layers as one object, with the values of `parameters`."""
    make = nnx.vmap(lambda key: _nnx_class(nnx)(nnx.Rngs(key)), **mode)
    stack = make(jax.random.split(jax.random.key(0), DEPTH))
    for name, value in parameters().items():
        shape = (DEPTH,) if groups is None else (groups, DEPTH // groups)
        kernel = getattr(stack, name).kernel
        kernel.set_value(value.reshape(*shape, *value.shape[1:]))
    return stack


def _nnx_forward(
    nnx: Any, program: str, stack: Any, x: jax.Array, **mode: bool
) -> jax.Array:
    def layer(x, module):
        return module(x)

    if program == "scan with remat":
        layer = nnx.remat(layer, **mode)
    axes = {"in_axes": (nnx.Carry, 0), "out_axes": nnx.Carry}
    over_layers = nnx.scan(layer, **axes, **mode)
    if program != "nested scan":
        return over_layers(x, stack)
    return nnx.scan(lambda x, group: over_layers(x, group), **axes, **mode)(x, stack)


def nnx_outputs(nnx: Any, program: str, **mode: bool) -> jax.Array:
    """What the layers compute, to be compared."""
    stack = nnx_stack(nnx, GROUPS if program == "nested scan" else None, **mode)
    return _nnx_forward(nnx, program, stack, _inputs(), **mode)


def raw_outputs(program: str) -> jax.Array:
    """What the layers compute in plain JAX."""
    return _raw_forward(program, parameters(), _inputs())
