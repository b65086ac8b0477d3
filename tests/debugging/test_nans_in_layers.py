"""`find_nans` names the layer that makes a non-finite value: every kind, both ways."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import zoo

HUGE, BIG, SMALL = 3e38, 1e30, 1e-30


class Net(zoo.Scale):
    """A layer with a parameter before it, whose gradient passes through the layer."""

    def __init__(self, layer):
        super().__init__(1.0)
        self.layer = layer

    def __call__(self, x):
        return self.layer(self.w * x if jnp.issubdtype(x.dtype, jnp.floating) else x)


@dataclasses.dataclass
class Row:
    """A layer, what makes its output bad, and what makes only its gradient bad.

    Attributes:
        layer: Makes the layer, given ``rngs``.
        x: Its input, forward and backward.
        plants: Changes the layer, forward and backward.
        weight: What its output is multiplied by: the cotangent.
        inner: Where in the layer that is.
    """

    layer: Callable[..., Any]
    x: tuple[Any, Any]
    plants: tuple[Callable[[Any], Any], Callable[[Any], Any]]
    weight: float = BIG
    inner: str = ""


def overflow(layer):
    """Products of its parameters and 2 are infinities of both signs: NaN in a sum."""
    random = np.random.default_rng(0)
    for _, param in nnx.to_flat_state(nnx.state(layer, nnx.Param)):
        param.set_value(HUGE * random.choice([-1.0, 1.0], param.shape).astype("f"))


def filled(*path, value):
    """Fills one parameter: a large one overflows by its product with a cotangent."""

    def plant(layer):
        for key in path:
            layer = layer[key] if isinstance(key, int) else getattr(layer, key)
        layer.set_value(jnp.full(layer.shape, value, layer.dtype))

    return plant


def epsilon(value, *zeros):
    """Without epsilon the inverse of a length 0 is infinite; its cube is sooner."""

    def plant(layer):
        layer.epsilon = value
        if zeros:
            filled(*zeros, value=0.0)(layer)

    return plant


def untouched(layer):
    """The input is enough."""


def product(layer, shape, *path, inner=""):
    x = jnp.full(shape, 2.0), jnp.full(shape, SMALL)
    plants = overflow, filled(*(path or ["kernel"]), value=1e20)
    return Row(layer, x, plants, inner=inner)


def norm(layer, shape=(2, 4)):
    """A constant input has no variance."""
    x = jnp.zeros(shape)
    return Row(layer, (x, x), (epsilon(0.0), epsilon(1e-35)), weight=1.0)


def norm_of_kernel(kind, plant):
    """One of a kernel of zeros; what makes only its gradient bad is given."""
    x = jnp.ones((2, 4))
    plants = epsilon(0.0, *KERNEL), plant
    return Row(lambda rngs: kind(linear(rngs=rngs), rngs=rngs), (x, x), plants, 1.0)


KERNEL = "layer_instance", "kernel"
IN_CELL = "cell", "ig", "kernel"
linear = partial(nnx.Linear, 4, 4)


def lstm(rngs):
    return nnx.RNN(nnx.LSTMCell(4, 4, rngs=rngs))


def gru(rngs):
    return nnx.RNN(nnx.GRUCell(4, 4, rngs=rngs))


ROWS = {
    "Linear": product(linear, (2, 4)),
    "LinearGeneral": product(
        partial(nnx.LinearGeneral, (2, 2), 4, axis=(-2, -1)), (2, 2, 2)
    ),
    "Einsum": product(partial(nnx.Einsum, "ab,bc->ac", (4, 4)), (2, 4)),
    "Conv": product(partial(nnx.Conv, 2, 3, (3,)), (1, 5, 2)),
    "ConvTranspose": product(partial(nnx.ConvTranspose, 2, 3, (3,)), (1, 5, 2)),
    "LoRA": product(
        partial(nnx.LoRA, 4, 2, 4, b_initializer=nnx.initializers.ones),
        (2, 4),
        "lora_a",
    ),
    # A token that isn't in the table; a token twice, whose gradients are added.
    "Embed": Row(
        partial(nnx.Embed, 5, 4),
        (jnp.array([1, 7]), jnp.array([1, 1])),
        (untouched, filled("embedding", value=SMALL)),
        weight=HUGE,
    ),
    "LayerNorm": norm(partial(nnx.LayerNorm, 4)),
    "RMSNorm": norm(partial(nnx.RMSNorm, 4)),
    "BatchNorm": norm(partial(nnx.BatchNorm, 4)),
    "GroupNorm": norm(partial(nnx.GroupNorm, 4, 2)),
    "InstanceNorm": norm(partial(nnx.InstanceNorm, 4), (1, 3, 4)),
    "WeightNorm": norm_of_kernel(nnx.WeightNorm, epsilon(1e-35, *KERNEL)),
    "SpectralNorm": norm_of_kernel(nnx.SpectralNorm, filled(*KERNEL, value=1e-12)),
    "MultiHeadAttention": product(
        partial(nnx.MultiHeadAttention, 2, 4, decode=False),
        (1, 3, 4),
        "value",
        "kernel",
    ),
    "RNN": product(lstm, (1, 3, 4), *IN_CELL, inner=".cell"),
    "RNN of GRUCell": product(
        gru, (1, 3, 4), "cell", "dense_i", "kernel", inner=".cell"
    ),
    "Bidirectional": product(
        lambda rngs: nnx.Bidirectional(lstm(rngs), lstm(rngs)),
        *((1, 3, 4), "forward_rnn", *IN_CELL),
        inner=".forward_rnn.cell",
    ),
    "Sequential": product(
        lambda rngs: nnx.Sequential(jnp.abs, linear(rngs=rngs)),
        *((2, 4), "layers", 1, "kernel"),
        inner=".layers[1]",
    ),
    "Dropout": Row(
        partial(nnx.Dropout, 0.5),
        (jnp.full(8, HUGE), jnp.full(8, SMALL)),
        (untouched, untouched),
        weight=HUGE,
    ),
    "PReLU": Row(
        lambda rngs: nnx.PReLU(),
        (jnp.full(2, -HUGE), jnp.full(2, -2.0)),
        (filled("negative_slope", value=2.0), filled("negative_slope", value=SMALL)),
        weight=HUGE,
    ),
    "AvgPool": Row(
        lambda rngs: nnx.AvgPool((2,)),
        (jnp.full((1, 4, 1), HUGE), None),
        (untouched, untouched),
    ),
    "MaxPool": Row(
        lambda rngs: nnx.MaxPool((3,)),
        (None, jnp.array([0.0, 0.0, SMALL, 0.0, 0.0]).reshape(1, 5, 1)),
        (untouched, untouched),
        weight=HUGE,
    ),
}


def loss(net, x, weight):
    return (net(x) * weight).sum()


CASES = [
    pytest.param(
        *(name, backward),
        id=f"{name}-{'backward' if backward else 'forward'}",
        marks=() if name == "RNN" else pytest.mark.long,
    )
    for name, row in ROWS.items()
    for backward in (False, True)
    if row.x[backward] is not None
]


@pytest.mark.parametrize(("name", "backward"), CASES)
def test_layer_is_named_that_makes_a_value_which_is_not_finite(name, backward):
    row = ROWS[name]
    layer = row.layer(rngs=nnx.Rngs(0))
    row.plants[backward](layer)
    net, x = Net(layer), row.x[backward]
    if backward:
        assert not nnx.debugging.find_nans(loss)(net, x, row.weight)
        report = nnx.debugging.find_nans(nnx.jit(nnx.grad(loss)))(net, x, row.weight)
    else:
        report = nnx.debugging.find_nans(nnx.jit(loss))(net, x, 1.0)
    expected = f"net.layer{row.inner}"
    assert report and (report.path + ".").startswith(expected + "."), str(report)


def test_the_table_has_twenty_kinds_forward_and_backward():
    counts = [sum(row.x[i] is not None for row in ROWS.values()) for i in range(2)]
    assert min(counts) >= 20
