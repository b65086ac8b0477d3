"""Layers called eagerly, beside the same mathematics in eager ``jnp``.

Raw code is what one writes for layers in float32: it checks nothing, and takes the
parameters from a dict. All libraries have the same ones. They are 8 wide, so that next
to nothing is computed.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import gpts
from benchmarks.gauges import Operation

WIDTH, HEADS, LENGTH, BATCH = 8, 2, 4, 2
DEPTH = WIDTH // HEADS
MOMENTUM = 0.99

Parameters = dict[str, Any]  # nested, as the attributes of the layer


def _draw(name: str) -> Parameters:
    """The parameters of a layer, the same ones each time."""
    shapes, treedef = jax.tree.flatten(SHAPES[name], is_leaf=_is_shape)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return treedef.unflatten(map(jax.random.normal, keys, shapes))


def _is_shape(x: Any) -> bool:
    return isinstance(x, tuple)


_AFFINE = {"scale": (WIDTH,), "bias": (WIDTH,)}
_PROJECTION = {"kernel": (WIDTH, HEADS, DEPTH), "bias": (HEADS, DEPTH)}
_OUT = {"kernel": (HEADS, DEPTH, WIDTH), "bias": (WIDTH,)}
SHAPES: dict[str, Parameters] = {
    "Linear": {"kernel": (WIDTH, WIDTH), "bias": (WIDTH,)},
    "LayerNorm": _AFFINE,
    "BatchNorm": _AFFINE,
    "MultiHeadAttention": {
        **dict.fromkeys(("query", "key", "value"), _PROJECTION),
        "out": _OUT,
    },
}


def inputs(name: str) -> jax.Array:
    """What the layer is called with."""
    shape = (BATCH, LENGTH, WIDTH) if name == "MultiHeadAttention" else (BATCH, WIDTH)
    return jax.random.normal(jax.random.key(1), shape)


# ---------------------------------------------------------------------------- raw JAX


def _linear(params: Parameters, x: jax.Array) -> jax.Array:
    return jnp.dot(x, params["kernel"]) + params["bias"]


def _batch_norm(params: Parameters, x: jax.Array) -> jax.Array:
    mean, square = jnp.mean(x, 0), jnp.mean(jnp.square(x), 0)
    variance = jnp.maximum(0.0, square - jnp.square(mean))
    factor = jax.lax.rsqrt(variance + 1e-5) * params["scale"]
    for name, new in {"mean": mean, "var": variance}.items():
        params[name] = MOMENTUM * params[name] + (1 - MOMENTUM) * new
    return (x - mean) * factor + params["bias"]


def _attention(
    attend: Callable[..., jax.Array],
) -> Callable[[Parameters, jax.Array], jax.Array]:
    def call(params: Parameters, x: jax.Array) -> jax.Array:
        q, k, v = [
            jnp.einsum("blw,whd->blhd", x, params[name]["kernel"])
            + params[name]["bias"]
            for name in ("query", "key", "value")
        ]
        y = jnp.einsum("blhd,hdw->blw", attend(q, k, v), params["out"]["kernel"])
        return y + params["out"]["bias"]

    return call


def _attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(DEPTH)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), v)


RAW: dict[str, dict[str, Callable[[Parameters, jax.Array], jax.Array]]] = {
    "Linear": {"jnp": _linear},
    "LayerNorm": {"jnp": gpts.norm},
    "BatchNorm": {"jnp": _batch_norm},
    "MultiHeadAttention": {
        "jnp.einsum": _attention(_attend),
        "jax.nn.dot_product_attention": _attention(jax.nn.dot_product_attention),
    },
}


def raw(variant: str, name: str) -> Operation:
    """The mathematics of a layer."""
    function, params, x = RAW[name][variant], _draw(name), inputs(name)
    if name == "BatchNorm":
        params |= {"mean": jnp.zeros(WIDTH), "var": jnp.ones(WIDTH)}
    return lambda: function(params, x)


# ----------------------------------------------------------------- Graftree, Flax NNX


def nnx(nnx: Any, name: str) -> Operation:
    """The layer, of Graftree or Flax NNX."""
    args, options = (WIDTH,), {}
    if name == "Linear":
        args = (WIDTH, WIDTH)
    if name == "MultiHeadAttention":
        args, options = (HEADS, WIDTH), {"decode": False}
    layer, x = getattr(nnx, name)(*args, **options, rngs=nnx.Rngs(0)), inputs(name)
    nnx.update(layer, _draw(name))
    return lambda: layer(x)
