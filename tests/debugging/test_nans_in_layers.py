"""`find_nans` names the layer that makes a non-finite value: every kind, both ways."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx

HUGE, BIG, SMALL = 3e38, 1e30, 1e-30


class Net(nnx.Module):
    """A layer with a parameter before it, whose gradient passes through the layer."""

    def __init__(self, layer):
        self.scale = nnx.Param(jnp.ones(()))
        self.layer = layer

    def __call__(self, x):
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return self.layer(x * self.scale if is_float else x)


@dataclasses.dataclass
class Row:
    """A layer, what makes its output bad, and what makes only its gradient bad.

    Attributes:
        layer: Makes the layer.
        x: Its input, forward and backward.
        plants: Changes the layer, forward and backward.
        weight: What its output is multiplied by: the cotangent.
        inner: Where in the layer that is.
    """

    layer: Callable[[nnx.Rngs], Any]
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


def weight_norm():
    x = jnp.ones((2, 4))
    kernel = "layer_instance", "kernel"
    plants = epsilon(0.0, *kernel), epsilon(1e-35, *kernel)

    def make(r):
        return nnx.WeightNorm(nnx.Linear(4, 4, rngs=r), rngs=r)

    return Row(make, (x, x), plants, weight=1.0)


def spectral_norm():
    x = jnp.ones((2, 4))
    kernel = "layer_instance", "kernel"
    plants = epsilon(0.0, *kernel), filled(*kernel, value=1e-12)

    def make(r):
        return nnx.SpectralNorm(nnx.Linear(4, 4, rngs=r), rngs=r)

    return Row(make, (x, x), plants, weight=1.0)


ROWS = {
    "Linear": product(lambda r: nnx.Linear(4, 4, rngs=r), (2, 4)),
    "LinearGeneral": product(
        lambda r: nnx.LinearGeneral((2, 2), 4, axis=(-2, -1), rngs=r), (2, 2, 2)
    ),
    "Einsum": product(lambda r: nnx.Einsum("ab,bc->ac", (4, 4), rngs=r), (2, 4)),
    "Conv": product(lambda r: nnx.Conv(2, 3, (3,), rngs=r), (1, 5, 2)),
    "ConvTranspose": product(
        lambda r: nnx.ConvTranspose(2, 3, (3,), rngs=r), (1, 5, 2)
    ),
    "LoRA": product(
        lambda r: nnx.LoRA(4, 2, 4, b_initializer=nnx.initializers.ones, rngs=r),
        *((2, 4), "lora_a"),
    ),
    # A token that isn't in the table; a token twice, whose gradients are added.
    "Embed": Row(
        lambda r: nnx.Embed(5, 4, rngs=r),
        (jnp.array([1, 7]), jnp.array([1, 1])),
        (untouched, filled("embedding", value=SMALL)),
        weight=HUGE,
    ),
    "LayerNorm": norm(lambda r: nnx.LayerNorm(4, rngs=r)),
    "RMSNorm": norm(lambda r: nnx.RMSNorm(4, rngs=r)),
    "BatchNorm": norm(lambda r: nnx.BatchNorm(4, rngs=r)),
    "GroupNorm": norm(lambda r: nnx.GroupNorm(4, 2, rngs=r)),
    "InstanceNorm": norm(lambda r: nnx.InstanceNorm(4, rngs=r), (1, 3, 4)),
    "WeightNorm": weight_norm(),
    "SpectralNorm": spectral_norm(),
    "MultiHeadAttention": product(
        lambda r: nnx.MultiHeadAttention(2, 4, decode=False, rngs=r),
        *((1, 3, 4), "value", "kernel"),
    ),
    "LSTMCell": product(
        lambda r: Applied(nnx.LSTMCell(4, 4, rngs=r)), (2, 4), "cell", "ig", "kernel"
    ),
    "GRUCell": product(
        lambda r: Applied(nnx.GRUCell(4, 4, rngs=r)),
        (2, 4),
        "cell",
        "dense_i",
        "kernel",
    ),
    "RNN": product(
        lambda r: nnx.RNN(nnx.LSTMCell(4, 4, rngs=r)),
        *((1, 3, 4), "cell", "ig", "kernel"),
        inner=".cell",
    ),
    "Bidirectional": product(
        lambda r: nnx.Bidirectional(
            nnx.RNN(nnx.LSTMCell(4, 4, rngs=r)), nnx.RNN(nnx.LSTMCell(4, 4, rngs=r))
        ),
        *((1, 3, 4), "forward_rnn", "cell", "ig", "kernel"),
        inner=".forward_rnn.cell",
    ),
    "Sequential": product(
        lambda r: nnx.Sequential(jnp.abs, nnx.Linear(4, 4, rngs=r)),
        *((2, 4), "layers", 1, "kernel"),
        inner=".layers[1]",
    ),
    "Dropout": Row(
        lambda r: nnx.Dropout(0.5, rngs=r),
        (jnp.full(8, HUGE), jnp.full(8, SMALL)),
        (untouched, untouched),
        weight=HUGE,
    ),
    "PReLU": Row(
        lambda r: nnx.PReLU(),
        (jnp.full(2, -HUGE), jnp.full(2, -2.0)),
        (filled("negative_slope", value=2.0), filled("negative_slope", value=SMALL)),
        weight=HUGE,
    ),
    "AvgPool": Row(
        lambda r: nnx.AvgPool((2,)),
        (jnp.full((1, 4, 1), HUGE), None),
        (untouched, untouched),
    ),
    "MaxPool": Row(
        lambda r: nnx.MaxPool((3,)),
        (None, jnp.array([0.0, 0.0, SMALL, 0.0, 0.0]).reshape(1, 5, 1)),
        (untouched, untouched),
        weight=HUGE,
    ),
}


class Applied(nnx.Module):
    """A cell, called with a state that is its input."""

    def __init__(self, cell):
        self.cell = cell

    def __call__(self, x):
        carry = self.cell.initialize_carry(x.shape, nnx.Rngs(0))
        return self.cell(jax.tree.map(lambda c: x[:, :4] + c, carry), x)[1]


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
    layer = row.layer(nnx.Rngs(0))
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
