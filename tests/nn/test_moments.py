"""The arithmetic of normalization: order of operations, dtypes, masks, collectives."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from graftree.nn import moments
from tests import random_arrays


def layer(**options):
    """What the functions read from a layer."""
    attributes = {
        "dtype": None,
        "axis_name": None,
        "axis_index_groups": None,
        "use_fast_variance": True,
        "epsilon": 0.0,
    }
    return types.SimpleNamespace(**attributes | options)


random = functools.partial(random_arrays.random, mean=3)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("axes", [(0,), (1, 2), (0, 1, 2)])
def test_moments_equal_numpy_and_keep_the_rank(fast, axes):
    x = random(4, 5, 6)
    mean, variance = moments.moments(layer(use_fast_variance=fast), x, axes)
    x = np.float64(x)
    np.testing.assert_allclose(mean, x.mean(axes, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(variance, x.var(axes, keepdims=True), rtol=1e-4)


def test_slow_variance_survives_a_large_mean():
    x = 1e4 + random(1000)
    fast = moments.moments(layer(), x, (0,))[1]
    slow = moments.moments(layer(use_fast_variance=False), x, (0,))[1]
    exact = np.float64(x).var()
    np.testing.assert_allclose(slow, [exact], rtol=1e-4)
    assert fast >= 0
    assert abs(fast - exact) > abs(slow - exact)


@pytest.mark.parametrize("fast", [True, False])
def test_variance_of_complex_numbers_is_real(fast):
    x = jax.lax.complex(random(50), 2 * random(50)[::-1])
    mean, variance = moments.moments(layer(use_fast_variance=fast), x, (0,))
    assert (mean.dtype, variance.dtype) == (jnp.complex64, jnp.float32)
    np.testing.assert_allclose(variance, [np.complex128(x).var()], rtol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "inputs", "expected"),
    [
        (None, jnp.bfloat16, jnp.float32),
        (jnp.float16, jnp.bfloat16, jnp.float32),
        (None, jnp.float32, jnp.float32),
        (jnp.complex64, jnp.float32, jnp.complex64),
    ],
)
def test_statistics_are_float32_or_wider(dtype, inputs, expected):
    x = random(4, dtype=inputs)
    assert moments.moments(layer(dtype=dtype), x, (0,))[0].dtype == expected


def test_float64_stays_float64(float64):
    assert moments.mean_square(layer(), random(4, dtype=float), (0,)).dtype == float


def test_mean_square_is_that_of_numpy():
    x = random(4, 5)
    expected = (np.float64(x) ** 2).mean(1, keepdims=True)
    np.testing.assert_allclose(
        moments.mean_square(layer(), x, (1,)), expected, rtol=1e-6
    )


@pytest.mark.parametrize("fast", [True, False])
def test_mask_selects_what_counts(fast):
    x, mask = random(4, 6), jnp.arange(6) < 4
    mask = moments.prepare_mask(mask, x)
    mean, variance = moments.moments(layer(use_fast_variance=fast), x, (1,), mask)
    x = np.float64(x)[:, :4]
    np.testing.assert_allclose(mean, x.mean(1, keepdims=True), rtol=1e-6)
    np.testing.assert_allclose(variance, x.var(1, keepdims=True), rtol=1e-4)


def test_a_mask_gets_the_rank_of_its_array():
    x = random(4, 3, 2)
    assert moments.prepare_mask(None, x) is None
    assert moments.prepare_mask([True, False], x).shape == (1, 1, 2)


@pytest.mark.parametrize("mask", [[1, 0], [1.0]])
def test_masks_of_numbers_are_refused(mask):
    with pytest.raises(ValueError, match="mask must be boolean"):
        moments.prepare_mask(mask, random(5, 2))


@pytest.mark.parametrize("fast", [True, False])
def test_moments_over_a_named_axis_are_those_of_the_whole(fast):
    x = random(4, 6)
    options = layer(axis_name="i", use_fast_variance=fast)
    mean, variance = jax.vmap(
        lambda x: moments.moments(options, x, (0,)), axis_name="i"
    )(x)
    np.testing.assert_allclose(mean.ravel(), [np.float64(x).mean()] * 4, rtol=1e-6)
    np.testing.assert_allclose(variance.ravel(), [np.float64(x).var()] * 4, rtol=1e-4)


def test_normalize_multiplies_before_it_adds():
    x = jnp.array([[1.0, 5.0]])
    y = moments.normalize(
        layer(),
        x,
        mean=jnp.array([[3.0]]),
        variance=jnp.array([[4.0]]),
        scale=jnp.array([10.0, 100.0]),
        bias=jnp.array([1.0, 2.0]),
        feature_axes=(1,),
    )
    np.testing.assert_array_equal(y, [[-9.0, 102.0]])


def test_normalize_without_mean_scale_and_bias_divides():
    x = random(2, 3)
    y = moments.normalize(layer(), x, None, jnp.full((2, 1), 4.0), None, None, (1,))
    np.testing.assert_array_equal(y, x / 2)


def test_result_has_the_promoted_dtype_unless_the_layer_says():
    half = jnp.ones((2, 3), jnp.bfloat16)
    variance, scale = jnp.ones((2, 1)), jnp.ones(3)
    plain = moments.normalize(layer(), half, None, variance, None, None, (1,))
    assert plain.dtype == jnp.bfloat16
    scaled = moments.normalize(layer(), half, None, variance, scale, None, (1,))
    assert scaled.dtype == jnp.float32
    told = layer(dtype=jnp.float16)
    cast = moments.normalize(told, half, None, variance, scale, None, (1,))
    assert cast.dtype == jnp.float16


def test_promote_passes_inputs_and_variables_in_their_order():
    norm = nnx.LayerNorm(3, promote_dtype=lambda args, **_: args, rngs=nnx.Rngs(0))
    x, mean, variance = random(2, 3), jnp.zeros(3), jnp.ones(3)
    variables = nnx.BatchStat(mean), nnx.BatchStat(variance)
    args = moments.promote(norm, x, *variables, None)
    assert args[0] is x and args[1] is mean and args[2] is variance
    assert args[3:] == (None,)
