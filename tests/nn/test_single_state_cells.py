"""The cells with one array to carry: initial values, options, dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests.nn import recurrent_cases


@pytest.mark.parametrize(
    ("name", "part", "first", "total"),
    [
        ("GRUCell", "dense_i", 0.7567299, -1.7439917),
        ("GRUCell", "dense_h", 0.4244834, 1.3665038),
        ("SimpleCell", "dense_i", -1.5153329, -4.4712596),
        ("SimpleCell", "dense_h", 0.5891491, -1.4714753),
    ],
)
def test_initial_values_are_the_published_ones(name, part, first, total):
    kernel = getattr(getattr(nnx, name)(2, 3, rngs=nnx.Rngs(0)), part).kernel[...]
    np.testing.assert_allclose(kernel.ravel()[0], first, rtol=1e-6)
    np.testing.assert_allclose(kernel.sum(), total, rtol=1e-6)


@pytest.mark.parametrize("name", ["SimpleCell", "GRUCell"])
def test_each_param_draws_one_key(name):
    rngs = nnx.Rngs(params=0)
    cell = getattr(nnx, name)(2, 3, rngs=rngs)
    assert rngs.params.count[...] == 3
    assert cell.dense_h.bias is None and cell.dense_i.bias is not None


def test_a_residual_cell_adds_its_carry():
    cell = nnx.SimpleCell(2, 3, residual=True, rngs=nnx.Rngs(0))
    x, h = (jax.random.normal(jax.random.key(n), (4, 2 + n)) for n in range(2))
    expected = recurrent_cases.simple(cell, np.float64(h), np.float64(x))[1]
    carry, y = cell(h, x)
    assert carry is y
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, jnp.float32),
        ({"dtype": None}, jnp.bfloat16),
        ({"dtype": jnp.float16}, jnp.float16),
    ],
)
def test_simple_cells_compute_in_float32_unless_told_otherwise(options, expected):
    cell = nnx.SimpleCell(2, 3, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0), **options)
    half = jnp.ones((1, 2), jnp.bfloat16)
    assert cell(jnp.ones((1, 3), jnp.bfloat16), half)[1].dtype == expected


def test_a_closed_update_gate_keeps_the_candidate_and_an_open_one_the_carry():
    h, x = jnp.full((1, 3), 0.5), jnp.ones((1, 2))
    open_cell = nnx.GRUCell(2, 3, gate_fn=jnp.ones_like, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(open_cell(h, x)[1], h)
    closed = nnx.GRUCell(2, 3, gate_fn=jnp.zeros_like, rngs=nnx.Rngs(0))
    w = recurrent_cases.product(closed.dense_i, np.ones((1, 2)))
    np.testing.assert_allclose(closed(h, x)[1], np.tanh(w[:, 6:]), rtol=1e-6)
