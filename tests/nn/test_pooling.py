"""Pooling against windows of NumPy, in every form of its arguments."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests.random_arrays import random


def windows(x, window, strides, pads):
    """All windows of ``x`` [batch, *axes, features], NaN where there is padding."""
    x = np.pad(np.float64(x), [(0, 0), *pads, (0, 0)], constant_values=np.nan)
    axes = tuple(range(1, x.ndim - 1))
    view = np.lib.stride_tricks.sliding_window_view(x, window, axes)
    view = view[(slice(None), *(slice(None, None, s) for s in strides))]
    return view.reshape(*view.shape[: x.ndim], -1)


CASES = [
    ((2,), (1,), ((0, 0),)),
    ((3,), (2,), ((1, 1),)),
    ((2, 3), (2, 1), ((0, 1), (1, 1))),
]


@pytest.mark.parametrize(("window", "strides", "pads"), CASES)
def test_pooling_equals_numpy(window, strides, pads):
    x = random(2, *(7, 6)[: len(window)], 3)
    seen = windows(x, window, strides, pads)
    args = (x, window, strides, pads)
    np.testing.assert_array_equal(nnx.max_pool(*args), np.nanmax(seen, -1))
    np.testing.assert_array_equal(nnx.min_pool(*args), np.nanmin(seen, -1))
    np.testing.assert_allclose(
        nnx.avg_pool(*args), np.nan_to_num(seen).mean(-1), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(
        nnx.avg_pool(*args, count_include_pad=False),
        np.nanmean(seen, -1),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("pool", [nnx.max_pool, nnx.min_pool, nnx.avg_pool])
@pytest.mark.parametrize("padding", ["SAME", ((1, 0), (0, 1))])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_any_number_of_batch_axes(pool, padding, batch):
    x = random(*batch, 4, 5, 2)
    y = pool(x, (2, 2), (1, 2), padding)
    flat = pool(jnp.asarray(np.reshape(x, (-1, 4, 5, 2))), (2, 2), (1, 2), padding)
    assert y.shape == (*batch, *flat.shape[1:])
    np.testing.assert_array_equal(y, np.reshape(flat, y.shape))


@pytest.mark.parametrize(
    "args",
    [
        (2, 2, 1),
        ([2, 2], [2, 2], [1, 1]),
        ((2, 2), np.array([2, 2]), [[1, 1], (1, 1)]),
        (np.int64(2), (2, 2), ((1, 1), 1)),
    ],
)
def test_ints_and_lists_are_taken(args):
    x = random(1, 6, 6, 2)
    expected = nnx.avg_pool(x, (2, 2), (2, 2), ((1, 1), (1, 1)))
    np.testing.assert_array_equal(nnx.avg_pool(x, *args), expected)


def test_an_int_is_the_extent_along_all_spatial_axes():
    assert nnx.max_pool(random(1, 6, 6, 6, 2), 3).shape == (1, 4, 4, 4, 2)
    assert nnx.max_pool(random(6, 2), 3).shape == (4, 2)


@pytest.mark.parametrize(
    "args",
    [
        ((2, 2, 2), None, "VALID"),
        ((2,), (1, 1), "VALID"),
        ((2,), None, ((1, 1), (1, 1))),
        ((2,), None, ((1, 1, 1),)),
    ],
)
def test_wrong_lengths_are_refused(args):
    with pytest.raises(AssertionError, match="window_shape"):
        nnx.max_pool(random(1, 6, 2), *args)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("count_include_pad", [True, False])
def test_average_keeps_the_float_dtype(dtype, count_include_pad):
    x = jnp.ones((1, 4, 2), dtype)
    y = nnx.avg_pool(x, 2, padding="SAME", count_include_pad=count_include_pad)
    assert y.dtype == dtype


def test_average_of_integers_is_float_and_does_not_overflow():
    y = nnx.avg_pool(jnp.full((1, 4, 1), 100, jnp.int8), (4,))
    np.testing.assert_array_equal(y, [[[100.0]]])


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint32, jnp.bfloat16])
def test_extrema_keep_the_dtype(dtype):
    x = jnp.arange(1, 9).astype(dtype).reshape(1, 8, 1)
    top = nnx.max_pool(x, (2,), (2,), ((1, 1),))
    low = nnx.min_pool(x, (2,), (2,), ((1, 1),))
    assert top.dtype == low.dtype == dtype
    np.testing.assert_array_equal(top.ravel().astype(int), [1, 3, 5, 7, 8])
    np.testing.assert_array_equal(low.ravel().astype(int), [1, 2, 4, 6, 8])


def test_pool_takes_any_reduction():
    x = jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 4, 1)
    y = nnx.pool(x, 1.0, jax.lax.mul, (2,), (1,), "VALID")
    np.testing.assert_array_equal(y.ravel(), [2.0, 6.0, 12.0])


@pytest.mark.parametrize("pool", [nnx.max_pool, nnx.min_pool, nnx.avg_pool])
def test_pooling_is_differentiable_and_jittable(pool):
    x = random(2, 6, 3)
    grad = jax.grad(lambda x: pool(x, (2,), (2,)).sum())(x)
    np.testing.assert_allclose(grad.sum(), 2 * 3 * 3, rtol=1e-5)
    jitted = jax.jit(lambda x: pool(x, (2,), (2,), "SAME"))(x)
    np.testing.assert_array_equal(jitted, pool(x, (2,), (2,), "SAME"))


@pytest.mark.peers
@pytest.mark.parametrize(
    ("padding", "strides"),
    list(itertools.product(["SAME", "VALID", ((1, 1), (0, 1))], [None, (2, 1)])),
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32, jnp.bfloat16])
def test_pooling_equals_the_peer(peer, padding, strides, dtype):
    x = (5 * random(2, 6, 5, 3)).astype(dtype)
    args = (x, (3, 2), strides, padding)
    for name in ("max_pool", "min_pool", "avg_pool"):
        ours, theirs = getattr(nnx, name)(*args), getattr(peer, name)(*args)
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_allclose(
        np.float32(nnx.avg_pool(*args, count_include_pad=False)),
        np.float32(peer.avg_pool(*args, count_include_pad=False)),
        rtol=1e-2 if dtype == jnp.bfloat16 else 1e-6,
    )
