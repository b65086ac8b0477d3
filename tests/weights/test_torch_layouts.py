"""Layers filled from PyTorch's tensors compute what PyTorch's documentation says."""

from functools import partial

import numpy as np
import pytest

import graftree as nnx
from tests.programs import in_one_program
from tests.weights.tensors import numbers


def loaded(make, **weights):
    """A layer with such weights, and none beside them."""
    model = nnx.eval_shape(lambda: nnx.Dict(layer=make(rngs=nnx.Rngs(0))))
    named = {f"x.{name.replace('__', '.')}": value for name, value in weights.items()}
    return nnx.weights.load(named, model, {"x": "layer"}).layer


def check_call(layer, *inputs, expected):
    found = in_one_program(layer, *inputs)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def correlated(x, weight):
    """``torch.nn.functional.conv1d``, with channels last, by its formula."""
    size = weight.shape[2]
    windows = [x[:, t : t + size] for t in range(x.shape[1] - size + 1)]
    return np.stack([np.einsum("nki,oik->no", w, weight) for w in windows], 1)


def correlated_by_halves(x, weight):
    """The same with two groups."""
    halves = [correlated(x[..., [g]], weight[2 * g : 2 * g + 2]) for g in (0, 1)]
    return np.concatenate(halves, -1)


def added(x, weight):
    """Each input adds its multiple of the kernel to the output, stride by stride."""
    expected = np.zeros((len(x), 2 * x.shape[1] + 2, weight.shape[1]))
    for t in range(x.shape[1]):
        part = np.einsum("ni,iok->nko", x[:, t], weight)
        expected[:, 2 * t : 2 * t + weight.shape[2]] += part
    return expected


VALID = {"padding": "VALID", "use_bias": False}
transposed = partial(nnx.ConvTranspose, 2, 3, (4,), strides=2, **VALID)


def normalized(*axes):
    def expected(x, weight, bias):
        mean, variance = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
        return (x - mean) / np.sqrt(variance + 1e-6) * weight + bias

    return expected


def by_statistics(x, weight, bias, running_mean, running_var):
    return (x - running_mean) / np.sqrt(running_var + 1e-5) * weight + bias


class MyLinear(nnx.Linear):
    """A subclass is stored like its class."""


AFFINE = {"weight": (3,), "bias": (3,)}
STATISTICS = {"running_mean": (3,), "running_var": (3,)}
NORMALIZES = AFFINE, (2, 5, 3)
# A layer, the shapes of its tensors and of an input, and what comes out.
LAYERS = {
    "Linear": (
        partial(nnx.Linear, 4, 3),
        {"weight": (3, 4), "bias": (3,)},
        (2, 4),
        lambda x, weight, bias: x @ weight.T + bias,
    ),
    "a subclass": (
        partial(MyLinear, 4, 3, use_bias=False),
        {"weight": (3, 4)},
        (2, 4),
        lambda x, weight: x @ weight.T,
    ),
    "one axis for all outputs": (
        partial(nnx.LinearGeneral, 4, (2, 3)),
        {"weight": (6, 4), "bias": (6,)},
        (2, 4),
        lambda x, weight, bias: (x @ weight.T + bias).reshape(2, 2, 3),
    ),
    "one axis for all inputs": (
        partial(nnx.LinearGeneral, (2, 3), 4, axis=(-2, -1), use_bias=False),
        {"weight": (4, 6)},
        (2, 2, 3),
        lambda x, weight: x.reshape(2, 6) @ weight.T,
    ),
    "Conv": (
        partial(nnx.Conv, 2, 3, (4,), padding="VALID"),
        {"weight": (3, 2, 4), "bias": (3,)},
        (1, 7, 2),
        lambda x, weight, bias: correlated(x, weight) + bias,
    ),
    "Conv in groups": (
        partial(nnx.Conv, 2, 4, (3,), feature_group_count=2, **VALID),
        {"weight": (4, 1, 3)},
        (1, 6, 2),
        correlated_by_halves,
    ),
    "ConvTranspose": (transposed, {"weight": (2, 3, 4)}, (1, 5, 2), added),
    "its kernel transposed": (
        partial(transposed, transpose_kernel=True),
        {"weight": (2, 3, 4)},
        (1, 5, 2),
        added,
    ),
    "LayerNorm": (partial(nnx.LayerNorm, 3), *NORMALIZES, normalized(-1)),
    "GroupNorm": (
        partial(nnx.GroupNorm, 3, num_groups=1),
        *NORMALIZES,
        normalized(1, 2),
    ),
    "InstanceNorm": (
        partial(nnx.InstanceNorm, 3),
        *NORMALIZES,
        normalized(1),
    ),
    "RMSNorm": (
        partial(nnx.RMSNorm, 3),
        {"weight": (3,)},
        (2, 3),
        lambda x, weight: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight,
    ),
    "BatchNorm": (
        partial(nnx.BatchNorm, 3, use_running_average=True, epsilon=1e-5),
        AFFINE | STATISTICS,
        (4, 3),
        by_statistics,
    ),
    "PReLU": (
        lambda rngs: nnx.PReLU(),
        {"weight": (1,)},
        (4,),
        lambda x, weight: np.where(x < 0, weight * x, x),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_compute_what_they_compute_in_pytorch(name):
    make, shapes, of_input, expected = LAYERS[name]
    # Positive, as a variance is.
    weights = {name: abs(numbers(*shape)) for name, shape in shapes.items()}
    x = numbers(*of_input)
    check_call(loaded(make, **weights), x, expected=expected(x, **weights))


def test_embed():
    weight = numbers(5, 3)
    layer = loaded(partial(nnx.Embed, 5, 3), weight=weight)
    check_call(layer, np.array([4, 0]), expected=weight[[4, 0]])


def test_a_bias_that_the_layer_lacks_is_unexpected():
    with pytest.raises(nnx.errors.StateMismatchError) as error:
        loaded(LAYERS["a subclass"][0], weight=numbers(3, 4), bias=numbers(3))
    assert error.value.unexpected == (("x.bias",),)


# ------------------------------------------------------------------------- attention


def attended(q, k, v):
    """One head, by the formula."""
    scores = np.exp(q @ k.T / np.sqrt(q.shape[1]))
    return scores / scores.sum(-1, keepdims=True) @ v


def test_multi_head_attention():
    """``torch.nn.MultiheadAttention``, by the formulas of its documentation."""
    x, w, b = numbers(5, 6), numbers(18, 6), numbers(18)
    out, shift = numbers(6, 6), numbers(6)
    weights = {"in_proj_weight": w, "in_proj_bias": b}
    weights |= {"out_proj__weight": out, "out_proj__bias": shift}
    layer = loaded(partial(nnx.MultiHeadAttention, 2, 6, decode=False), **weights)
    q, k, v = np.split(x @ w.T + b, 3, axis=1)
    heads = [attended(*(y[:, h : h + 3] for y in (q, k, v))) for h in (0, 3)]
    check_call(layer, x, expected=np.concatenate(heads, 1) @ out.T + shift)


def test_attention_to_inputs_of_another_size_has_a_tensor_for_each():
    make = partial(nnx.MultiHeadAttention, 1, 4, in_kv_features=3, decode=False)
    weights = {
        "q_proj_weight": numbers(4, 4),
        "k_proj_weight": numbers(4, 3),
        "v_proj_weight": numbers(4, 3),
        "in_proj_bias": numbers(12),
        "out_proj__weight": numbers(4, 4),
        "out_proj__bias": numbers(4),
    }
    layer = loaded(make, **weights)
    x, y = numbers(2, 4), numbers(5, 3)
    q, k, v, b, w, out = weights.values()
    heads = attended(x @ q.T + b[:4], y @ k.T + b[4:8], y @ v.T + b[8:])
    check_call(layer, x, y, expected=heads @ w.T + out)


# ----------------------------------------------------------------------------- cells


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


CELL = {
    f"{name}_{a}h_l0": f"cell.dense_{a}.{key}"
    for a in "ih"
    for name, key in (("weight", "kernel"), ("bias", "bias"))
}


def filled_cell(cls, gates, other):
    """A cell with two biases: PyTorch has one for inputs and one for the state."""

    def make():
        cell = cls(2, 3, rngs=nnx.Rngs(0))
        shape = getattr(cell, other).kernel.shape
        setattr(cell, other, nnx.Linear(*shape, rngs=nnx.Rngs(0)))
        return nnx.Dict(cell=cell)

    size = gates * 3
    weights = numbers(size, 2), numbers(size), numbers(size, 3), numbers(size)
    named = dict(zip(CELL, weights, strict=True))
    return nnx.weights.load(named, nnx.eval_shape(make), CELL).cell, weights


def test_lstm_with_both_biases():
    cell, (w, b, u, d) = filled_cell(nnx.OptimizedLSTMCell, 4, "dense_i")
    x, c, h = numbers(4, 2), numbers(4, 3), numbers(4, 3)
    i, f, g, o = np.split(x @ w.T + b + h @ u.T + d, 4, axis=-1)
    c_next = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    (_, y), _ = in_one_program(cell, (c, h), x)
    np.testing.assert_allclose(y, sigmoid(o) * np.tanh(c_next), rtol=1e-4, atol=1e-5)


def test_gru_with_both_biases():
    cell, (w, b, u, d) = filled_cell(nnx.GRUCell, 3, "dense_h")
    x, h = numbers(4, 2), numbers(4, 3)
    (r, z, n), (s, t, m) = [np.split(y, 3, axis=-1) for y in (x @ w.T + b, h @ u.T + d)]
    r, z = sigmoid(r + s), sigmoid(z + t)
    expected = (1 - z) * np.tanh(n + r * m) + z * h
    found = in_one_program(cell, h, x)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
