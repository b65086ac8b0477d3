"""The two cells with a memory: initial values, and that both compute the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx


@pytest.mark.parametrize(
    ("part", "first", "total"),
    [
        ("ii", 0.7567299, -1.5841567),
        ("if_", -1.5153329, -4.4712596),
        ("hi", -0.7837888, -1.3580108),
        ("ho", -0.1426982, -2.3456446),
    ],
)
def test_initial_values_of_the_lstm_are_the_published_ones(part, first, total):
    kernel = getattr(nnx.LSTMCell(2, 3, rngs=nnx.Rngs(0)), part).kernel[...]
    np.testing.assert_allclose(kernel.ravel()[0], first, rtol=1e-6)
    np.testing.assert_allclose(kernel.sum(), total, rtol=1e-6)


def test_initial_values_of_the_optimized_lstm_are_the_published_ones():
    cell = nnx.OptimizedLSTMCell(2, 3, rngs=nnx.Rngs(0))
    for kernel, first, total in [
        (cell.dense_i.kernel[...], 0.7567299, -0.5423267),
        (cell.dense_h.kernel[...], -0.5433681, -2.7342030),
    ]:
        np.testing.assert_allclose(kernel.ravel()[0], first, rtol=1e-6)
        np.testing.assert_allclose(kernel.sum(), total, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "draws"), [("LSTMCell", 12), ("OptimizedLSTMCell", 3)]
)
def test_each_param_draws_one_key(name, draws):
    rngs = nnx.Rngs(params=0)
    cell = getattr(nnx, name)(2, 3, rngs=rngs)
    assert rngs.params.count[...] == draws == len(jax.tree.leaves(cell))


def test_both_cells_are_the_same_function_of_matching_weights():
    rngs = nnx.Rngs(0)
    cell = nnx.LSTMCell(2, 3, bias_init=nnx.initializers.normal(), rngs=rngs)
    fast = nnx.OptimizedLSTMCell(2, 3, rngs=rngs)
    inputs, hidden = ("ii", "if_", "ig", "io"), ("hi", "hf", "hg", "ho")
    for part, names in ((fast.dense_i, inputs), (fast.dense_h, hidden)):
        kernels = [getattr(cell, name).kernel[...] for name in names]
        part.kernel[...] = jnp.concatenate(kernels, axis=1)
    biases = [getattr(cell, name).bias[...] for name in hidden]
    fast.dense_h.bias[...] = jnp.concatenate(biases)
    x = jax.random.normal(jax.random.key(1), (4, 2))
    carry = cell.initialize_carry(x.shape, rngs, nnx.initializers.normal())
    for a, b in zip(
        jax.tree.leaves(cell(carry, x)), jax.tree.leaves(fast(carry, x)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["LSTMCell", "OptimizedLSTMCell"])
def test_gates_and_activations_may_be_replaced(name):
    calls = []

    def recorded(label):
        return lambda x: calls.append(label) or x

    cell = getattr(nnx, name)(
        2,
        3,
        gate_fn=recorded("gate"),
        activation_fn=recorded("activation"),
        rngs=nnx.Rngs(0),
    )
    cell((jnp.ones((1, 3)),) * 2, jnp.ones((1, 2)))
    assert sorted(calls) == ["activation"] * 2 + ["gate"] * 3


@pytest.mark.parametrize("name", ["LSTMCell", "OptimizedLSTMCell"])
def test_an_array_with_an_axis_for_the_states_is_a_carry(name):
    cell = getattr(nnx, name)(2, 3, rngs=nnx.Rngs(0))
    carry, x = jnp.ones((2, 4, 3)), jnp.ones((4, 2))
    np.testing.assert_array_equal(cell(carry, x)[1], cell(tuple(carry), x)[1])
    with pytest.raises(ValueError, match="a tuple of 2 arrays"):
        cell(jnp.ones((2, 3)), jnp.ones((2, 2)))
