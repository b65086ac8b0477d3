"""Layers filled from PyTorch's tensors compute what PyTorch's documentation says."""

import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx

rng = np.random.default_rng(0)


def normal(*shape):
    return rng.normal(size=shape).astype(np.float32)


def loaded(layer, **weights):
    model = nnx.Dict(layer=layer)
    named = {f"x.{name.replace('__', '.')}": value for name, value in weights.items()}
    return nnx.weights.load(named, model, {"x": "layer"}).layer


RNGS = nnx.Rngs(0)


def test_linear():
    weight, bias, x = normal(3, 4), normal(3), normal(2, 4)
    layer = loaded(nnx.Linear(4, 3, rngs=RNGS), weight=weight, bias=bias)
    np.testing.assert_allclose(layer(x), x @ weight.T + bias, rtol=1e-5)


def test_linear_general_has_one_axis_for_all_outputs():
    weight, bias, x = normal(6, 4), normal(6), normal(2, 4)
    layer = loaded(nnx.LinearGeneral(4, (2, 3), rngs=RNGS), weight=weight, bias=bias)
    np.testing.assert_allclose(
        layer(x), (x @ weight.T + bias).reshape(2, 2, 3), rtol=1e-5
    )


def test_linear_general_has_one_axis_for_all_inputs():
    weight, x = normal(4, 6), normal(2, 2, 3)
    layer = nnx.LinearGeneral((2, 3), 4, axis=(-2, -1), use_bias=False, rngs=RNGS)
    layer = loaded(layer, weight=weight)
    np.testing.assert_allclose(layer(x), x.reshape(2, 6) @ weight.T, rtol=1e-5)


def test_embed():
    weight = normal(5, 3)
    layer = loaded(nnx.Embed(5, 3, rngs=RNGS), weight=weight)
    np.testing.assert_array_equal(layer(jnp.array([4, 0])), weight[[4, 0]])


def correlated(x, weight):
    """``torch.nn.functional.conv1d`` of ``[channels, length]``, by its formula."""
    outputs, _, size = weight.shape
    length = x.shape[1] - size + 1
    return np.array(
        [
            [np.sum(x[:, t : t + size] * weight[o]) for t in range(length)]
            for o in range(outputs)
        ]
    )


def test_conv():
    weight, bias, x = normal(3, 2, 4), normal(3), normal(2, 7)
    layer = nnx.Conv(2, 3, kernel_size=(4,), padding="VALID", rngs=RNGS)
    layer = loaded(layer, weight=weight, bias=bias)
    expected = correlated(x, weight) + bias[:, None]
    np.testing.assert_allclose(layer(x.T[None])[0].T, expected, rtol=1e-4, atol=1e-5)


def test_grouped_conv():
    weight, x = normal(4, 1, 3), normal(2, 6)
    layer = nnx.Conv(
        2, 4, (3,), padding="VALID", feature_group_count=2, use_bias=False, rngs=RNGS
    )
    layer = loaded(layer, weight=weight)
    halves = [correlated(x[[g]], weight[2 * g : 2 * g + 2]) for g in range(2)]
    np.testing.assert_allclose(
        layer(x.T[None])[0].T, np.concatenate(halves), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("transpose_kernel", [False, True])
def test_conv_transpose(transpose_kernel):
    """Each input adds its multiple of the kernel to the output, stride by stride."""
    weight, x, stride = normal(2, 3, 4), normal(2, 5), 2
    expected = np.zeros((3, 4 * stride + 4))
    for t in range(5):
        expected[:, t * stride : t * stride + 4] += np.einsum(
            "i,iok->ok", x[:, t], weight
        )
    layer = nnx.ConvTranspose(
        2,
        3,
        (4,),
        strides=stride,
        padding="VALID",
        transpose_kernel=transpose_kernel,
        use_bias=False,
        rngs=RNGS,
    )
    layer = loaded(layer, weight=weight)
    np.testing.assert_allclose(layer(x.T[None])[0].T, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nnx.LayerNorm(3, rngs=RNGS),
        lambda: nnx.GroupNorm(3, num_groups=1, rngs=RNGS),
        lambda: nnx.InstanceNorm(3, rngs=RNGS),
    ],
    ids=["LayerNorm", "GroupNorm", "InstanceNorm"],
)
def test_norms(make):
    weight, bias = normal(3), normal(3)
    layer = loaded(make(), weight=weight, bias=bias)
    np.testing.assert_array_equal(layer.scale, weight)
    np.testing.assert_array_equal(layer.bias, bias)


def test_rms_norm():
    weight = normal(3)
    layer = loaded(nnx.RMSNorm(3, rngs=RNGS), weight=weight)
    np.testing.assert_array_equal(layer.scale, weight)


def test_batch_norm_has_its_statistics():
    weight, bias, mean, var = normal(3), normal(3), normal(3), normal(3) ** 2
    layer = nnx.BatchNorm(3, use_running_average=True, epsilon=1e-5, rngs=RNGS)
    layer = loaded(layer, weight=weight, bias=bias, running_mean=mean, running_var=var)
    x = normal(4, 3)
    expected = (x - mean) / np.sqrt(var + 1e-5) * weight + bias
    np.testing.assert_allclose(layer(x), expected, rtol=1e-4, atol=1e-5)


def test_prelu():
    layer = loaded(nnx.PReLU(), weight=np.array([0.5], np.float32))
    np.testing.assert_array_equal(layer(jnp.array([-2.0, 2.0])), [-1, 2])


def test_multi_head_attention():
    """``torch.nn.MultiheadAttention``, by the formulas of its documentation."""
    width, heads, x = 6, 2, normal(5, 6)
    in_weight, in_bias = normal(18, 6), normal(18)
    out_weight, out_bias = normal(6, 6), normal(6)
    layer = nnx.MultiHeadAttention(heads, width, decode=False, rngs=RNGS)
    layer = loaded(
        layer,
        in_proj_weight=in_weight,
        in_proj_bias=in_bias,
        out_proj__weight=out_weight,
        out_proj__bias=out_bias,
    )
    q, k, v = np.split(x @ in_weight.T + in_bias, 3, axis=1)
    outputs = []
    for h in range(heads):
        of_head = slice(h * 3, h * 3 + 3)
        scores = q[:, of_head] @ k[:, of_head].T / np.sqrt(3)
        shares = np.exp(scores - scores.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        outputs.append(shares @ v[:, of_head])
    expected = np.concatenate(outputs, 1) @ out_weight.T + out_bias
    np.testing.assert_allclose(layer(x), expected, rtol=1e-4, atol=1e-5)


def test_subclasses_are_stored_like_their_class():
    class MyLinear(nnx.Linear):
        pass

    weight = normal(3, 4)
    layer = loaded(MyLinear(4, 3, use_bias=False, rngs=RNGS), weight=weight)
    np.testing.assert_array_equal(layer.kernel, weight.T)


def test_a_bias_that_the_layer_lacks_is_unexpected():
    layer = nnx.Linear(4, 3, use_bias=False, rngs=RNGS)
    with pytest.raises(nnx.errors.StateMismatchError) as error:
        loaded(layer, weight=normal(3, 4), bias=normal(3))
    assert error.value.unexpected == (("x.bias",),)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_attention_to_inputs_of_another_size_has_a_tensor_for_each():
    layer = nnx.MultiHeadAttention(1, 4, in_kv_features=3, decode=False, rngs=RNGS)
    weights = {
        "q_proj_weight": normal(4, 4),
        "k_proj_weight": normal(4, 3),
        "v_proj_weight": normal(4, 3),
        "in_proj_bias": normal(12),
        "out_proj__weight": normal(4, 4),
        "out_proj__bias": normal(4),
    }
    layer = loaded(layer, **weights)
    x, y = normal(2, 4), normal(5, 3)
    q, k, v, b, w, out = weights.values()
    q, k, v = x @ q.T + b[:4], y @ k.T + b[4:8], y @ v.T + b[8:]
    expected = softmax(q @ k.T / 2) @ v @ w.T + out
    np.testing.assert_allclose(layer(x, y), expected, rtol=1e-4, atol=1e-5)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def with_two_biases(cell, name):
    """PyTorch's cells have one for the inputs, and one for the state."""
    kernel = getattr(cell, name).kernel
    setattr(cell, name, nnx.Linear(*kernel.shape, rngs=nnx.Rngs(0)))
    return nnx.Dict(cell=cell)


CELL = {
    f"{name}_{a}h_l0": f"cell.dense_{a}.{key}"
    for a in "ih"
    for name, key in (("weight", "kernel"), ("bias", "bias"))
}


def cell_weights(gates):
    shapes = (gates * 3, 2), (gates * 3,), (gates * 3, 3), (gates * 3,)
    return dict(zip(CELL, (normal(*shape) for shape in shapes), strict=True))


def test_lstm_with_both_biases():
    weights = cell_weights(4)
    model = with_two_biases(nnx.OptimizedLSTMCell(2, 3, rngs=nnx.Rngs(0)), "dense_i")
    nnx.weights.load(weights, model, CELL)
    x, c, h = normal(4, 2), normal(4, 3), normal(4, 3)
    w, b, u, d = weights.values()
    i, f, g, o = np.split(x @ w.T + b + h @ u.T + d, 4, axis=-1)
    c_next = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    (_, y), _ = model.cell((c, h), x)
    np.testing.assert_allclose(y, sigmoid(o) * np.tanh(c_next), rtol=1e-4, atol=1e-5)


def test_gru_with_both_biases():
    weights = cell_weights(3)
    model = with_two_biases(nnx.GRUCell(2, 3, rngs=nnx.Rngs(0)), "dense_h")
    nnx.weights.load(weights, model, CELL)
    x, h = normal(4, 2), normal(4, 3)
    w, b, u, d = weights.values()
    (r, z, n), (s, t, m) = [np.split(y, 3, axis=-1) for y in (x @ w.T + b, h @ u.T + d)]
    r, z = sigmoid(r + s), sigmoid(z + t)
    expected = (1 - z) * np.tanh(n + r * m) + z * h
    np.testing.assert_allclose(model.cell(h, x)[0], expected, rtol=1e-4, atol=1e-5)
