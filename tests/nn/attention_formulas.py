"""Attention in float64 NumPy, as the textbook has it: what the tests compare with."""

import jax.numpy as jnp
import numpy as np
from scipy import special

import graftree as nnx


def weights(query, key, bias=None, mask=None, is_causal=False):
    """The attention weights, with a key head per query head."""
    query, key = np.asarray(query, float), np.asarray(key, float)
    key = np.repeat(key, query.shape[-2] // key.shape[-2], axis=-2)
    logits = np.einsum("...qhd,...khd->...hqk", query, key) / query.shape[-1] ** 0.5
    logits = logits if bias is None else logits + np.asarray(bias, float)
    visible = np.ones(logits.shape, bool)
    if is_causal:
        visible &= np.tril(np.ones(logits.shape[-2:], bool))
    if mask is not None:
        mask = np.asarray(mask, bool)
        visible &= mask.reshape(mask.shape[-logits.ndim :])  # without surplus axes
    # Finite: where nothing is visible, all counts alike.
    return special.softmax(np.where(visible, logits, -1e300), axis=-1)


def average(weights, value):
    """The values, averaged with the weights."""
    value = np.asarray(value, float)
    value = np.repeat(value, weights.shape[-3] // value.shape[-2], axis=-2)
    return np.einsum("...hqk,...khd->...qhd", weights, value)


def attention(query, key, value, **options):
    """Dot-product attention."""
    return average(weights(query, key, **options), value)


def make_layer(num_heads=4, in_features=8, *args, **options):
    """A MultiHeadAttention with biases that are not zero."""
    numbers = np.random.default_rng(0)

    def initializer(key, shape, dtype):  # as `random`: compiles nothing
        return jnp.asarray(numbers.normal(scale=0.5, size=shape), dtype)

    defaults = {"decode": False, "kernel_init": initializer, "bias_init": initializer}
    return nnx.MultiHeadAttention(
        num_heads, in_features, *args, **defaults | options, rngs=nnx.Rngs(0)
    )


def params_of(layer):
    """The Params of a layer by their dotted paths."""
    return {
        ".".join(path): np.asarray(variable[...], float)
        for path, variable in nnx.to_flat_state(nnx.state(layer, nnx.Param))
    }


def layer_output(layer, inputs_q, inputs_k=None, **options):
    """What a MultiHeadAttention with these Params computes."""
    params = params_of(layer)
    inputs_k = inputs_q if inputs_k is None else inputs_k

    def project(name, x):
        kernel, bias = params[f"{name}.kernel"], params[f"{name}.bias"]
        y = np.einsum("...i,ihd->...hd", np.asarray(x, float), kernel) + bias
        scale = params.get(f"{name}_ln.scale")
        if scale is None:
            return y
        y = y - y.mean(-1, keepdims=True)
        return y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) * scale

    heads = attention(
        project("query", inputs_q),
        project("key", inputs_k),
        project("value", inputs_k),
        **options,
    )
    kernel, bias = params["out.kernel"], params["out.bias"]
    return np.einsum("...hd,hdo->...o", heads, kernel) + bias
