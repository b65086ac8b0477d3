"""The train step of a small GPT: a model large enough that tracing it takes time.

Learned positions, blocks that normalize first, causal attention, a head tied to the
embedding. Raw JAX is the program that one would write without a library: functions of
dicts. Each call of what `raw` and `nnx` give makes a new function, so that JAX traces
anew; only the functions of JAX itself have been traced before, for all alike.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks import steps

WIDTH = 32
HEADS = 4
VOCABULARY = 64
LENGTH = 16
BATCH = 2
EPSILON = 1e-6
LINEARS = {  # per block: inputs and outputs
    "query": (WIDTH, WIDTH),
    "key": (WIDTH, WIDTH),
    "value": (WIDTH, WIDTH),
    "out": (WIDTH, WIDTH),
    "up": (WIDTH, 4 * WIDTH),
    "down": (4 * WIDTH, WIDTH),
}
NORMS = ("norm_attention", "norm_mlp")


def batch() -> dict[str, jax.Array]:
    """Tokens, and the tokens after them."""
    tokens = jnp.arange(BATCH * (LENGTH + 1)).reshape(BATCH, -1) % VOCABULARY
    return {"x": tokens[:, :-1], "y": tokens[:, 1:]}


def parameters(depth: int) -> dict[str, Any]:
    """The parameters as nested dicts."""
    keys = iter(jax.random.split(jax.random.key(0), 2 + depth * len(LINEARS)))
    draw = jax.nn.initializers.normal(0.02)

    def linear(shape):
        return {"kernel": draw(next(keys), shape), "bias": jnp.zeros(shape[1])}

    def norm():
        return {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)}

    def block():
        linears = {name: linear(shape) for name, shape in LINEARS.items()}
        return linears | {name: norm() for name in NORMS}

    return {
        "embed": draw(next(keys), (VOCABULARY, WIDTH)),
        "positions": draw(next(keys), (LENGTH, WIDTH)),
        "blocks": [block() for _ in range(depth)],
        "norm": norm(),
    }


def _cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    heads = [x.reshape(*x.shape[:-1], HEADS, -1) for x in (query, key, value)]
    return jax.nn.dot_product_attention(*heads, is_causal=True).reshape(query.shape)


# ---------------------------------------------------------------------------- raw JAX


def raw(depth: int) -> Callable[[], steps.Step]:
    """Makes the train step as a pure function, each time a new one."""
    params = parameters(depth)
    objects = {"params": params, "opt_state": steps.ADAM.init(params)}

    def make():
        def update(params, opt_state, x, y):
            loss, grads = jax.value_and_grad(_loss)(params, x, y)
            params, opt_state = steps.updated(params, opt_state, grads)
            return (params, opt_state), loss

        return steps.PureStep(jax.jit(update), objects, batch())

    return make


def _loss(params: dict[str, Any], x: jax.Array, y: jax.Array) -> jax.Array:
    h = params["embed"][x] + params["positions"]
    for block in params["blocks"]:
        h = _block(block, h)
    return _cross_entropy(norm(params["norm"], h) @ params["embed"].T, y)


def _block(params: dict[str, Any], h: jax.Array) -> jax.Array:
    x = norm(params["norm_attention"], h)
    attended = attention(
        _linear(params["query"], x),
        _linear(params["key"], x),
        _linear(params["value"], x),
    )
    h = h + _linear(params["out"], attended)
    x = norm(params["norm_mlp"], h)
    return h + _linear(params["down"], jax.nn.gelu(_linear(params["up"], x)))


def _linear(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x @ params["kernel"] + params["bias"]


def norm(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """What ``nnx.LayerNorm`` computes."""
    mean = jnp.mean(x, axis=-1, keepdims=True)
    square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    var = jnp.maximum(square - jnp.square(mean), 0)
    factor = jax.lax.rsqrt(var + EPSILON) * params["scale"]
    return (x - mean) * factor + params["bias"]


# ----------------------------------------------------------------- Graftree, Flax NNX


def nnx(nnx: Any, depth: int, **mode: bool) -> Callable[[], steps.Step]:
    """Makes the train step on objects, each time of a new function."""
    model = _nnx_model(nnx, parameters(depth))
    optimizer = nnx.Optimizer(model, steps.ADAM, wrt=nnx.Param)
    objects = {"model": model, "optimizer": optimizer}

    def make():
        def loss_of(model, x, y):
            return _cross_entropy(model(x), y)

        function = nnx.jit(steps.nnx_update(nnx, loss_of, **mode), **mode)
        return steps.Step(function, objects, batch())

    return make


@functools.cache
def _nnx_class(nnx: Any) -> type:
    class Block(nnx.Module):
        def __init__(self, *, rngs):
            for name, (inputs, outputs) in LINEARS.items():
                setattr(self, name, nnx.Linear(inputs, outputs, rngs=rngs))
            for name in NORMS:
                setattr(self, name, nnx.LayerNorm(WIDTH, epsilon=EPSILON, rngs=rngs))

        def __call__(self, h):
            x = self.norm_attention(h)
            h = h + self.out(attention(self.query(x), self.key(x), self.value(x)))
            x = self.norm_mlp(h)
            return h + self.down(nnx.gelu(self.up(x)))

    class GPT(nnx.Module):
        def __init__(self, depth, *, rngs):
            self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
            self.positions = nnx.Param(jnp.zeros((LENGTH, WIDTH)))
            self.blocks = nnx.List([Block(rngs=rngs) for _ in range(depth)])
            self.norm = nnx.LayerNorm(WIDTH, epsilon=EPSILON, rngs=rngs)

        def __call__(self, tokens):
            h = self.embed(tokens) + self.positions[...]
            for block in self.blocks:
                h = block(h)
            return self.embed.attend(self.norm(h))

    return GPT


def _nnx_model(nnx: Any, params: dict[str, Any]) -> Any:
    """The model with these values."""
    model = _nnx_class(nnx)(len(params["blocks"]), rngs=nnx.Rngs(0))
    model.embed.embedding[...] = params["embed"]
    model.positions[...] = params["positions"]
    for block, values in zip(model.blocks, params["blocks"], strict=True):
        for name in LINEARS:
            getattr(block, name).kernel[...] = values[name]["kernel"]
    return model
