"""What tests of recurrent networks share: formulas in NumPy, networks, sequences."""

import functools

import jax.numpy as jnp
import numpy as np

import graftree as nnx
from tests.random_arrays import random


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def product(layer, x):
    """What a Linear computes."""
    y = x @ np.float64(layer.kernel[...])
    return y if layer.bias is None else y + np.float64(layer.bias[...])


def lstm(cell, carry, x):
    c, h = carry
    i, f, g, o = (
        product(getattr(cell, a), x) + product(getattr(cell, b), h)
        for a, b in [("ii", "hi"), ("if_", "hf"), ("ig", "hg"), ("io", "ho")]
    )
    return remember(c, i, f, g, o)


def optimized_lstm(cell, carry, x):
    c, h = carry
    total = product(cell.dense_i, x) + product(cell.dense_h, h)
    return remember(c, *np.split(total, 4, axis=-1))


def remember(c, i, f, g, o):
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    h = sigmoid(o) * np.tanh(c)
    return (c, h), h


def simple(cell, h, x):
    total = product(cell.dense_i, x) + product(cell.dense_h, h)
    h = np.tanh(total + h if cell.residual else total)
    return h, h


def gru(cell, h, x):
    w, u = product(cell.dense_i, x), product(cell.dense_h, h)
    (w_r, w_z, w_n), (u_r, u_z, u_n) = np.split(w, 3, -1), np.split(u, 3, -1)
    r, z = sigmoid(w_r + u_r), sigmoid(w_z + u_z)
    h = (1 - z) * np.tanh(w_n + r * u_n) + z * h
    return h, h


STEPS = {
    "LSTMCell": lstm,
    "OptimizedLSTMCell": optimized_lstm,
    "SimpleCell": simple,
    "GRUCell": gru,
}


def scan(cell, carry, xs):
    """The last carry and the outputs of a batch ``[batch, time, features]``."""
    step, outputs = STEPS[type(cell).__name__], []
    for x in np.moveaxis(np.float64(xs), 1, 0):
        carry, y = step(cell, carry, x)
        outputs.append(y)
    return carry, np.stack(outputs, 1)


def make(name="GRUCell", **options):
    return nnx.RNN(getattr(nnx, name)(2, 3, rngs=nnx.Rngs(0)), **options)


normal = functools.partial(random, seed=1)


class Sum(nnx.Module):
    """Sums up to the present step; the carry is a pytree with batch axes first."""

    num_feature_axes = 1

    def __call__(self, carry, x):
        total = carry["total"] + x
        return {"total": total, "count": carry["count"] + 1}, total

    def initialize_carry(self, input_shape, rngs=None):
        return {"total": jnp.zeros(input_shape), "count": jnp.zeros(input_shape[:-1])}


SEQUENCE = jnp.array([[1.0, 2.0, 3.0, 10.0], [4.0, 20.0, 30.0, 40.0]])[..., None]
