"""What XLA plans for a compiled program: bytes of arguments, outputs and temporaries.

These are exact and do not depend on the machine's load, so that a library can be held
to the program that one writes by hand. There are five of that: a train step, the same
with donated arguments, and the gradient of layers that are scanned, scanned and
rematerialized, and scanned in groups. The layers are residual MLPs, all in one stack.

At the end: how much a donated train step needs at its peak, over the size of its state.
There is what Python holds when a step begins, and what XLA allocates for the step: its
temporaries, and those outputs that don't take the place of a donated input. Both are
exact, on every backend: the first is the sum over the arrays alive, the second is in
the plan of the compiled program. A library that holds the arrays of the step before, or
whose outputs don't meet their donated inputs, has a second copy of the state in one of
the two, and so a figure larger by one.
"""

import functools
import gc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import perceptrons, steps
from benchmarks.gauges import Operation
from benchmarks.groups import Made

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


def _read(compiled: Callable[..., Any]) -> Callable[..., Operation]:
    """The bytes of a part of the program that ``compiled`` gives."""

    def operation_of(*args: Any, part: str, **mode: bool) -> Operation:
        return lambda: getattr(compiled(*args, **mode).memory_analysis(), PARTS[part])

    return operation_of


def _inputs() -> jax.Array:
    return jnp.linspace(-1, 1, BATCH * WIDTH).reshape(BATCH, WIDTH)


# ---------------------------------------------------------------------------- raw JAX


@functools.cache
def _raw(program: str) -> Any:
    if "train" in program:
        step = perceptrons.raw(DEPTH, WIDTH, donate="donated" in program)
        return step.lower().compile()
    stack = jax.eval_shape(parameters)

    def loss(params, x):
        return jnp.sum(_raw_forward(program, params, x) ** 2)

    return jax.jit(jax.value_and_grad(loss)).lower(stack, _inputs()).compile()


def parameters() -> dict[str, dict[str, jax.Array]]:
    """The parameters of the stack."""
    up, down = jax.random.split(jax.random.key(0))
    return {
        "up": {"kernel": jax.random.normal(up, (DEPTH, WIDTH, 4 * WIDTH)) * 0.1},
        "down": {"kernel": jax.random.normal(down, (DEPTH, 4 * WIDTH, WIDTH)) * 0.1},
    }


def _raw_forward(program: str, params: Any, x: jax.Array) -> jax.Array:
    def layer(x, params):
        hidden = jax.nn.gelu(x @ params["up"]["kernel"])
        return x + hidden @ params["down"]["kernel"], None

    if program == "scan with remat":
        layer = jax.checkpoint(layer)
    if program != "nested scan":
        return jax.lax.scan(layer, x, params)[0]
    groups = jax.tree.map(_grouped, params)
    return jax.lax.scan(lambda x, group: jax.lax.scan(layer, x, group), x, groups)[0]


def _grouped(stacked: jax.Array) -> jax.Array:
    return stacked.reshape(GROUPS, -1, *stacked.shape[1:])


# ----------------------------------------------------------------- Graftree, Flax NNX


@functools.cache
def _nnx(nnx: Any, program: str, **mode: bool) -> Any:
    if "train" in program:
        options = {"donate": "donated" in program, **mode}
        return perceptrons.nnx(nnx, DEPTH, WIDTH, **options).lower().compile()
    stack = _nnx_stack(nnx, program, **mode)

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


def _nnx_stack(nnx: Any, program: str, **mode: bool) -> Any:
    """All layers as one object, with the values of `parameters`."""
    make = nnx.vmap(lambda key: _nnx_class(nnx)(nnx.Rngs(key)), **mode)
    stack = make(jax.random.split(jax.random.key(0), DEPTH))
    values = parameters()
    if program == "nested scan":
        values = jax.tree.map(_grouped, values)
    nnx.update(stack, values)
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
    stack = _nnx_stack(nnx, program, **mode)
    return _nnx_forward(nnx, program, stack, _inputs(), **mode)


def raw_outputs(program: str) -> jax.Array:
    """What the layers compute in plain JAX."""
    return _raw_forward(program, parameters(), _inputs())


BYTES = Made(_read(_raw), _read(_nnx))


# ----------------------------------------------------------- the peak of a train step

PEAK_DEPTH = 4
PEAK_WIDTH = 256

PEAK = Made(
    lambda: peak(lambda: perceptrons.raw(PEAK_DEPTH, PEAK_WIDTH, donate=True)),
    lambda nnx, **mode: peak(
        lambda: perceptrons.nnx(nnx, PEAK_DEPTH, PEAK_WIDTH, donate=True, **mode)
    ),
)


def peak(make: Callable[[], steps.Step]) -> Operation:
    """Trains a few times with a new step and gives the peak, in states."""

    def operation():
        before = _live_bytes()
        step = make()
        for _ in range(3):
            step()
        held = _live_bytes() - before
        plan = step.lower().compile().memory_analysis()
        outputs = plan.output_size_in_bytes - plan.alias_size_in_bytes
        return (held + outputs + plan.temp_size_in_bytes) / _state_bytes()

    return operation


def _live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def _state_bytes() -> int:
    params = perceptrons.parameters(PEAK_DEPTH, PEAK_WIDTH)
    state = (params, steps.ADAM.init(params))
    return sum(array.nbytes for array in jax.tree.leaves(state))
