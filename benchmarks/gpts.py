"""The train step of a small GPT: a model large enough that tracing it takes time.

Learned positions, blocks that normalize first, causal attention, a head tied to the
embedding. Raw JAX is the program that one would write without a library: functions of
dicts. Each call of what `raw` and `nnx` give makes a new function, so that JAX traces
again; only the functions of JAX itself have been traced before, for all alike.

At the end is a block with the library's own attention, and the size of the program that
it becomes. Raw JAX is what one would write for the same layout of parameters. What is
counted are equations of the jaxpr, nested ones included: what tracing makes, and every
later pass of JAX walks.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks import gauges, steps
from benchmarks.gauges import Operation
from benchmarks.groups import Made

WIDTH = 32
HEADS = 4
VOCABULARY = 64
LENGTH = 16
BATCH = 2
EPSILON = 1e-6
PROJECTIONS = ("query", "key", "value")
MLP = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
LINEARS = {  # per block: inputs and outputs
    **dict.fromkeys((*PROJECTIONS, "out"), (WIDTH, WIDTH)),
    **MLP,
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

    def block():
        linears = {name: linear(shape) for name, shape in LINEARS.items()}
        return linears | {name: _norm_parameters() for name in NORMS}

    return {
        "embed": {"embedding": draw(next(keys), (VOCABULARY, WIDTH))},
        "positions": draw(next(keys), (LENGTH, WIDTH)),
        "blocks": [block() for _ in range(depth)],
        "norm": _norm_parameters(),
    }


def _norm_parameters() -> dict[str, jax.Array]:
    return {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)}


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
    table = params["embed"]["embedding"]
    h = table[x] + params["positions"]
    for block in params["blocks"]:
        h = _block(block, h)
    return _cross_entropy(norm(params["norm"], h) @ table.T, y)


def _block(params: dict[str, Any], h: jax.Array) -> jax.Array:
    x = norm(params["norm_attention"], h)
    attended = attention(*[_linear(params[name], x) for name in PROJECTIONS])
    return _mlp(params, h + _linear(params["out"], attended))


def _mlp(params: dict[str, Any], h: jax.Array) -> jax.Array:
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
    nnx.update(model, params | {"blocks": dict(enumerate(params["blocks"]))})
    return model


def lowering(make: Callable[[], steps.Step]) -> Operation:
    """Tracing and lowering, as in a first call."""
    return lambda: make().lower()


def _at_many_depths(make: Callable[[], steps.Step]) -> Operation:
    return gauges.at_many_depths(lowering(make))


def _lines(make: Callable[[], steps.Step]) -> Operation:
    """The length of what XLA gets from that."""
    return lambda: make().lower().as_text().count("\n")


def _made(operation_of: Callable[..., Operation]) -> Made:
    return Made(
        lambda depth: operation_of(raw(depth)),
        lambda library, depth, **mode: operation_of(nnx(library, depth, **mode)),
    )


LOWERING, LINES = _made(_at_many_depths), _made(_lines)


# --------------------------------------------- a block with the attention of a library

INPUTS = (2, 16, WIDTH)
KERNELS = {
    **dict.fromkeys(PROJECTIONS, (WIDTH, HEADS, WIDTH // HEADS)),
    "out": (HEADS, WIDTH // HEADS, WIDTH),
    **MLP,
}
# Equations that only stand for others, which are counted themselves.
CALLS = ("jit", "pjit", "custom_jvp_call")


def inputs() -> jax.Array:
    """A batch of sequences."""
    return jax.random.normal(jax.random.key(1), INPUTS)


def block_parameters() -> dict[str, Any]:
    """The parameters of the block as nested dicts."""
    keys = jax.random.split(jax.random.key(0), len(KERNELS))
    draw = jax.nn.initializers.normal(0.1)
    linears = {
        name: {
            "kernel": draw(key, shape),
            "bias": jnp.zeros(shape[1:] if name in PROJECTIONS else shape[-1:]),
        }
        for key, (name, shape) in zip(keys, KERNELS.items(), strict=True)
    }
    norms = {name: _norm_parameters() for name in NORMS}
    attention = {name: linears.pop(name) for name in (*PROJECTIONS, "out")}
    return {**norms, **linears, "attention": attention}


def raw_block(params: Any, h: jax.Array) -> jax.Array:
    """The block as a function."""
    x, attention = norm(params["norm_attention"], h), params["attention"]
    heads = [_contracted(attention[name], x, axes=1) for name in PROJECTIONS]
    attended = jax.nn.dot_product_attention(*heads, is_causal=True)
    return _mlp(params, h + _contracted(attention["out"], attended, axes=2))


def _contracted(params: Any, x: jax.Array, axes: int) -> jax.Array:
    last = tuple(range(x.ndim - axes, x.ndim))
    contracted = (last, tuple(range(axes)))
    y = jax.lax.dot_general(x, params["kernel"], (contracted, ((), ())))
    return y + params["bias"]


@functools.cache
def _nnx_block_class(nnx: Any) -> type:
    class Block(nnx.Module):
        def __init__(self, *, rngs):
            self.norm_attention = nnx.LayerNorm(WIDTH, epsilon=EPSILON, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(
                HEADS, WIDTH, decode=False, rngs=rngs
            )
            self.norm_mlp = nnx.LayerNorm(WIDTH, epsilon=EPSILON, rngs=rngs)
            self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
            self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

        def __call__(self, h):
            h = h + self.attention(self.norm_attention(h), is_causal=True)
            return h + self.down(nnx.gelu(self.up(self.norm_mlp(h))))

    return Block


def nnx_block(nnx: Any) -> Any:
    """The block as an object, with the values of `block_parameters`."""
    block = _nnx_block_class(nnx)(rngs=nnx.Rngs(0))
    nnx.update(block, block_parameters())
    return block


def _counting(block: Callable[..., jax.Array], model: Any, of: str) -> Operation:
    """The number of equations that tracing the block gives, or its gradient."""

    def loss(model, h):
        return jnp.sum(block(model, h) ** 2)

    function = block if of == "forward" else jax.grad(loss)
    return lambda: _count(jax.make_jaxpr(function)(model, inputs()).jaxpr)


def _count(jaxpr: Any) -> int:
    own = sum(equation.primitive.name not in CALLS for equation in jaxpr.eqns)
    values = jax.tree.leaves([[*equation.params.values()] for equation in jaxpr.eqns])
    inner = [getattr(value, "jaxpr", value) for value in values]
    return own + sum(_count(value) for value in inner if hasattr(value, "eqns"))


EQUATIONS = Made(
    lambda of: _counting(raw_block, block_parameters(), of),
    lambda nnx, of: _counting(lambda m, h: m(h), nnx_block(nnx), of),
)
