"""A transformer block of the library's own layers, and the program that it becomes.

The block normalizes first, attends causally and has an MLP, as in GPT-2. Raw JAX is
what one would write for the same layout of parameters. What is counted are equations of
the jaxpr, nested ones included: what tracing makes, and every later pass of JAX walks.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import gpts

WIDTH = 32
HEADS = 4
HEAD_SIZE = WIDTH // HEADS
INPUTS = (2, 16, WIDTH)
KERNELS = {
    "query": (WIDTH, HEADS, HEAD_SIZE),
    "key": (WIDTH, HEADS, HEAD_SIZE),
    "value": (WIDTH, HEADS, HEAD_SIZE),
    "out": (HEADS, HEAD_SIZE, WIDTH),
    "up": (WIDTH, 4 * WIDTH),
    "down": (4 * WIDTH, WIDTH),
}
BIASES = {
    "query": (HEADS, HEAD_SIZE),
    "key": (HEADS, HEAD_SIZE),
    "value": (HEADS, HEAD_SIZE),
    "out": (WIDTH,),
    "up": (4 * WIDTH,),
    "down": (WIDTH,),
}
# Equations that only stand for others, which are counted themselves.
CALLS = ("jit", "pjit", "custom_jvp_call")


def equations(function: Callable[..., Any], *args: Any) -> int:
    """The number of equations that tracing the function gives."""
    return _count(jax.make_jaxpr(function)(*args).jaxpr)


def _count(jaxpr: Any) -> int:
    own = sum(equation.primitive.name not in CALLS for equation in jaxpr.eqns)
    values = jax.tree.leaves([[*equation.params.values()] for equation in jaxpr.eqns])
    inner = [getattr(value, "jaxpr", value) for value in values]
    return own + sum(_count(value) for value in inner if hasattr(value, "eqns"))


def inputs() -> jax.Array:
    """A batch of sequences."""
    return jax.random.normal(jax.random.key(1), INPUTS)


# ---------------------------------------------------------------------------- raw JAX


def parameters() -> dict[str, dict[str, jax.Array]]:
    """The parameters of a block as nested dicts."""
    keys = jax.random.split(jax.random.key(0), len(KERNELS))
    draw = jax.nn.initializers.normal(0.1)
    linears = {
        name: {"kernel": draw(key, KERNELS[name]), "bias": jnp.zeros(BIASES[name])}
        for name, key in zip(KERNELS, keys, strict=True)
    }
    norm = {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)}
    return linears | {name: dict(norm) for name in gpts.NORMS}


def raw(params: Any, h: jax.Array) -> jax.Array:
    """The block as a function."""
    x = gpts.norm(params["norm_attention"], h)
    heads = [_linear(params[name], x) for name in ("query", "key", "value")]
    attended = jax.nn.dot_product_attention(*heads, is_causal=True)
    h = h + _linear(params["out"], attended, axes=2)
    x = gpts.norm(params["norm_mlp"], h)
    return h + _linear(params["down"], jax.nn.gelu(_linear(params["up"], x)))


def _linear(params: Any, x: jax.Array, axes: int = 1) -> jax.Array:
    last = tuple(range(x.ndim - axes, x.ndim))
    contracted = (last, tuple(range(axes)))
    y = jax.lax.dot_general(x, params["kernel"], (contracted, ((), ())))
    return y + params["bias"]


def loss(block: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """What is differentiated."""
    return lambda model, h: jnp.sum(block(model, h) ** 2)


# ----------------------------------------------------------------- Graftree, Flax NNX


@functools.cache
def nnx_class(nnx: Any) -> type:
    """The class of the block, for Graftree or Flax NNX."""

    class Block(nnx.Module):
        def __init__(self, *, rngs):
            self.norm_attention = nnx.LayerNorm(WIDTH, epsilon=gpts.EPSILON, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(
                HEADS, WIDTH, decode=False, rngs=rngs
            )
            self.norm_mlp = nnx.LayerNorm(WIDTH, epsilon=gpts.EPSILON, rngs=rngs)
            self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
            self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

        def __call__(self, h):
            h = h + self.attention(self.norm_attention(h), is_causal=True)
            return h + self.down(nnx.gelu(self.up(self.norm_mlp(h))))

    return Block


def nnx_block(nnx: Any) -> Any:
    """The block as an object, with the values of `parameters`."""
    block = nnx_class(nnx)(rngs=nnx.Rngs(0))
    values = parameters()
    for name in KERNELS:
        owner = block if name in ("up", "down") else block.attention
        getattr(owner, name).kernel[...] = values[name]["kernel"]
    return block
