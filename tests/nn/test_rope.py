"""Rotary positions: the rotation, its tables, and attention that uses it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests.nn import attention_formulas
from tests.programs import in_one_program
from tests.random_arrays import random


def rotated(x, positions=None, theta=10000.0):
    """The rotation in float64, pair by pair as complex numbers."""
    x = np.asarray(x, float)
    length, size = x.shape[-2:]
    positions = np.arange(length) if positions is None else np.asarray(positions, float)
    angles = positions[..., None] / theta ** (2 * np.arange(size // 2) / size)
    pairs = x[..., : size // 2] + 1j * x[..., size // 2 :]
    pairs = pairs * np.exp(1j * angles)
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


TABLE = {"embedding_size": 6, "max_seq_len": 7}
# Shape of the inputs, positions, arguments of the layer.
ROTATIONS = [
    *(
        (shape, None, {"theta": theta, **sizes})
        for shape in [(5, 6), (2, 3, 7, 6)]
        for theta in (10000.0, 500.0)
        for sizes in ({}, TABLE)
    ),
    ((2, 3, 8), [3, 0, 9], {}),
    ((2, 3, 8), [[0, 1, 2], [5, 6, 7]], {}),
    ((2, 3, 8), [[0.5, -1.5, 100.0], [0.0, 0.0, 1.0]], {}),
    ((2, 2, 3, 8), [[[0, 1, 2]], [[7, 8, 9]]], {}),
    ((3, 6), [10, 20, 30], TABLE),  # these go before the tables
]


@pytest.mark.parametrize(("shape", "positions", "options"), ROTATIONS)
def test_pairs_turn_with_the_position(shape, positions, options, float64):
    x = random(*shape, dtype=float)
    given = None if positions is None else jnp.array(positions)
    y = in_one_program(nnx.RoPE(**options), x, given)
    assert y.dtype == jnp.float64
    expected = rotated(x, positions, options.get("theta", 10000.0))
    np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-12)
    narrow = nnx.eval_shape(nnx.RoPE(**options), x.astype(jnp.float32))
    assert narrow.dtype == jnp.float32


def test_dot_products_depend_on_distances_only():
    rope, x = nnx.RoPE(), random(4, 8)
    near, far = rope(x), rope(x, jnp.arange(4) + 17)
    np.testing.assert_allclose(near @ near.T, far @ far.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        jnp.linalg.norm(far, axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-5
    )


def test_tables_are_variables_that_train_with_nothing():
    rope = nnx.RoPE(embedding_size=6, max_seq_len=4)
    assert type(rope.cached_sin) is nnx.Variable
    assert rope.cached_sin.shape == rope.cached_cos.shape == (4, 3)
    angles = np.arange(4)[:, None] / 10000.0 ** (np.arange(3) / 3)
    np.testing.assert_allclose(rope.cached_sin[...], np.sin(angles), atol=1e-6)
    np.testing.assert_allclose(rope.cached_cos[...], np.cos(angles), atol=1e-6)
    assert not jax.tree.leaves(nnx.state(rope, nnx.Param))
    assert not jax.tree.leaves(nnx.state(nnx.RoPE()))


@pytest.mark.parametrize("sizes", [{}, {"embedding_size": 64, "max_seq_len": 500}])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_goes_in_and_out_and_is_rounded_once(sizes, dtype):
    x = random(500, 64).astype(dtype)
    y = nnx.RoPE(**sizes)(x)
    assert y.dtype == dtype
    full = nnx.RoPE()(x.astype(jnp.float32))
    # One rounding errs by half a unit in the last place.
    half_unit = 0.51 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(y.astype(jnp.float32), full, rtol=half_unit, atol=1e-7)


@pytest.mark.parametrize("size", [3, 0, -2])
def test_sizes_are_two_and_that_of_the_embedding_is_positive_and_even(size):
    for sizes in ({"embedding_size": 4}, {"max_seq_len": 4}, {"max_seq_len": 0}):
        with pytest.raises(ValueError, match="both `embedding_size` and `max_seq_len`"):
            nnx.RoPE(**sizes)
    with pytest.raises(ValueError, match="must be positive and even"):
        nnx.RoPE(embedding_size=size, max_seq_len=4)
    with pytest.raises(ValueError, match="must be positive and even"):
        nnx.RoPE()(jnp.ones((2, max(size, 0))))


@pytest.mark.parametrize(
    ("shape", "positions", "sizes", "message"),
    [
        ((2, 3, 4), jnp.arange(2), {}, "must have the same seq_len"),
        ((2, 3, 4), jnp.array(1), {}, "must have the same seq_len"),
        ((2, 3, 4), jnp.ones((1, 1, 3)), {}, "more batch axes"),
        ((8, 6), None, TABLE, r"max_seq_len=7.*length 8"),
        ((2, 4), None, TABLE, r"embedding_size=6.*size 4"),
    ],
)
def test_positions_and_tables_must_fit(shape, positions, sizes, message):
    with pytest.raises(ValueError, match=message):
        nnx.RoPE(**sizes)(jnp.ones(shape), positions)


# --------------------------------------------------------------------- attention


def over_length(x, positions=None):
    """Rotates ``[batch, length, heads, depth]`` in float64."""
    x = np.moveaxis(np.asarray(x, float), -2, -3)
    positions = None if positions is None else np.asarray(positions)[..., None, :]
    return np.moveaxis(rotated(x, positions), -3, -2)


attend = functools.partial(
    in_one_program, nnx.dot_product_attention_with_rope, rope=nnx.RoPE()
)


@pytest.mark.parametrize("positions", [None, [4, 5, 9], [[0, 1, 2], [6, 8, 9]]])
def test_queries_and_keys_of_all_heads_are_rotated(positions):
    query, key = random(2, 3, 4, 6, seed=1), random(2, 3, 2, 6, seed=2)
    value = random(2, 3, 2, 6, seed=3)
    given = None if positions is None else jnp.array(positions)
    y = attend(query, key, value, input_positions=given, is_causal=True)
    rotated = over_length(query, positions), over_length(key, positions)
    expected = attention_formulas.attention(*rotated, value, is_causal=True)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sizes", [{}, TABLE])
@pytest.mark.parametrize("positions", [None, [4, 5, 9], [[0, 1, 2], [6, 8, 9]]])
def test_heads_are_rotated_where_they_are(sizes, positions):
    x = random(2, 3, 4, 6)
    y = in_one_program(nnx.RoPE(**sizes).rotate_heads, x, positions)
    np.testing.assert_allclose(y, over_length(x, positions), rtol=1e-5, atol=1e-5)


def test_a_rope_of_ones_own_is_called_for_attention():
    class Still(nnx.RoPE):
        def __call__(self, x, input_positions=None):
            return x

    x = random(2, 3, 1, 6)
    y = nnx.dot_product_attention_with_rope(x, x, x, rope=Still())
    np.testing.assert_array_equal(y, nnx.dot_product_attention(x, x, x))


@pytest.mark.parametrize("positions", [[7, 8], [[7, 8], [1, 3]]])
def test_positions_are_those_of_the_queries_if_there_are_more_keys(positions):
    query, key = random(2, 2, 1, 6, seed=1), random(2, 9, 1, 6, seed=2)
    y = attend(query, key, key, input_positions=jnp.array(positions))
    expected = attention_formulas.attention(
        over_length(query, positions), over_length(key), key
    )
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_half_precision_stays_half_through_attention():
    x = random(2, 3, 1, 4).astype(jnp.bfloat16)
    assert jax.eval_shape(attend, x, x, x).dtype == jnp.bfloat16
