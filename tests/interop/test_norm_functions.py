"""Norms that people build from the functions of Flax's ``nn.normalization``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import tables

normalization = nnx.nn.normalization
X = np.random.default_rng(0).normal(size=(4, 5, 6)).astype(np.float32)


@tables.cases(
    "axes, options",
    (-1, {}),
    ((0, 1), {"use_fast_variance": False}),
    ([2, -3], {"use_mean": False}),
    (1, {"mask": X > -1}),
)
def test_statistics_are_those_of_numpy_without_the_reduced_axes(axes, options):
    mean, variance = normalization._compute_stats(X, axes, None, **options)
    kept = {"axis": tuple(np.atleast_1d(axes)), "where": options.get("mask", True)}
    wide = X.astype(np.float64)
    expected = np.mean(wide, **kept) if options.get("use_mean", True) else 0 * mean
    np.testing.assert_allclose(mean, expected, atol=1e-6)
    square = np.mean(np.square(wide), **kept)
    np.testing.assert_allclose(variance, square - np.square(expected), atol=1e-5)


def test_a_norm_of_ones_own_is_layer_norm_to_the_bit():
    layer = nnx.LayerNorm(6, rngs=nnx.Rngs(0))
    layer.scale[...], layer.bias[...] = jnp.arange(6.0), jnp.ones(6)
    x = jnp.asarray(X, jnp.bfloat16)
    mean, variance = normalization._compute_stats(x, -1, None)
    y = normalization._normalize(
        x, mean, variance, layer.scale, layer.bias, -1, -1, None, 1e-6
    )
    assert y.dtype == layer(x).dtype and (y == layer(x)).all()


def test_statistics_average_over_a_mapped_axis():
    mean, _ = jax.vmap(
        lambda x: normalization._compute_stats(x, 0, None, "rows"), axis_name="rows"
    )(X)
    np.testing.assert_allclose(mean[0], X.mean((0, 1)), atol=1e-6)


def test_axes_are_ascending_and_exist():
    canonical = normalization._canonicalize_axes
    assert canonical(4, (-1, 1, 3)) == (1, 3) and canonical(2, -1) == (1,)
    with pytest.raises(ValueError):
        canonical(2, 2)
