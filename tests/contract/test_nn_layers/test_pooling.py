"""Pooling: functions and layers against NumPy, windows, padding, dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import random_arrays, tables
from tests.comparisons import raises

LAYERS = {
    nnx.MaxPool: nnx.max_pool,
    nnx.MinPool: nnx.min_pool,
    nnx.AvgPool: nnx.avg_pool,
}
GLOBAL = {
    nnx.GlobalMaxPool: np.max,
    nnx.GlobalMinPool: np.min,
    nnx.GlobalAvgPool: np.mean,
}
every_pool = pytest.mark.parametrize("pool", LAYERS.values())
every_layer = pytest.mark.parametrize("cls", LAYERS)
every_global = pytest.mark.parametrize("cls", GLOBAL)


def windows(x, window, strides, pads):
    """All windows of ``x`` [batch, *axes, features], NaN where there is padding."""
    x = np.pad(np.float64(x), [(0, 0), *pads, (0, 0)], constant_values=np.nan)
    axes = tuple(range(1, x.ndim - 1))
    view = np.lib.stride_tricks.sliding_window_view(x, window, axes)
    view = view[(slice(None), *(slice(None, None, s) for s in strides))]
    return view.reshape(*view.shape[: x.ndim], -1)


@tables.cases(
    "window, strides, pads",
    ((2,), (1,), ((0, 0),)),
    ((3,), (2,), ((1, 1),)),
    ((2, 3), (2, 1), ((0, 1), (1, 1))),
)
def test_pooling_equals_numpy(window, strides, pads):
    x = random_arrays.random(2, *(7, 6)[: len(window)], 3)
    seen = windows(x, window, strides, pads)
    args = (x, window, strides, pads)
    np.testing.assert_array_equal(nnx.max_pool(*args), np.nanmax(seen, -1))
    np.testing.assert_array_equal(nnx.min_pool(*args), np.nanmin(seen, -1))
    for counts, expected in ((True, np.nan_to_num(seen).mean), (False, None)):
        expected = np.nanmean(seen, -1) if expected is None else expected(-1)
        y = nnx.avg_pool(*args, count_include_pad=counts)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@every_pool
@pytest.mark.parametrize("padding", ["SAME", ((1, 0), (0, 1))])
def test_any_number_of_batch_axes(pool, padding):
    x = random_arrays.random(2, 3, 4, 5, 2)
    options = {"strides": (1, 2), "padding": padding}
    y = pool(x, (2, 2), **options)
    assert y.shape[:2] == (2, 3)
    np.testing.assert_array_equal(pool(x[0], (2, 2), **options), y[0])
    np.testing.assert_array_equal(pool(x[1, 2], (2, 2), **options), y[1, 2])


@every_layer
@tables.cases(
    "args",
    (2, 2, 1),
    ([2, 2], [2, 2], [1, 1]),
    ((2, 2), np.array([2, 2]), [[1, 1], (1, 1)]),
    (np.int64(2), (2, 2), ((1, 1), 1)),
    (np.int64(2), np.array([2, 2]), np.int32(1)),
    (2, np.int64(2), np.ones((2, 2), int)),
)
def test_ints_and_lists_are_taken_also_by_layers(cls, args):
    x, pool = random_arrays.random(1, 6, 5, 2), LAYERS[cls]
    expected = pool(x, (2, 2), (2, 2), ((1, 1), (1, 1)))
    np.testing.assert_array_equal(pool(x, *args), expected)
    np.testing.assert_array_equal(cls(*args)(x), expected)


@every_layer
def test_strides_are_one_and_padding_none_by_default(cls):
    x, pool = random_arrays.random(1, 5, 2), LAYERS[cls]
    expected = pool(x, (2,), (1,), ((0, 0),))
    for y in (pool(x, (2,)), cls(2)(x), cls((2,), None, "VALID")(x)):
        np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(cls(2, 2, "SAME")(x), pool(x, (2,), (2,), "SAME"))
    args = (2, 2, "SAME", False)  # padding counts in averages unless told otherwise
    np.testing.assert_array_equal(nnx.AvgPool(*args)(x), nnx.avg_pool(x, *args))


@tables.cases(
    "args",
    ((2, 2, 2), None, "VALID"),
    ((2,), (1, 1), "VALID"),
    ((2,), None, ((1, 1), (1, 1))),
    ((2,), None, ((1, 1, 1),)),
)
@every_layer
def test_wrong_lengths_are_refused(cls, args):
    x = random_arrays.random(1, 6, 2)
    with pytest.raises(AssertionError, match="window_shape"):
        LAYERS[cls](x, *args)
    with pytest.raises(AssertionError, match="window_shape"):
        cls((2, 2, 2))(x)


@pytest.mark.parametrize("count_include_pad", [True, False])
def test_averages_keep_float_dtypes_and_those_of_integers_are_float(count_include_pad):
    options = {"padding": "SAME", "count_include_pad": count_include_pad}
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        x = jnp.ones((1, 4, 2), dtype)
        assert nnx.eval_shape(lambda x: nnx.avg_pool(x, 2, **options), x).dtype == dtype
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
    np.testing.assert_array_equal(y.ravel(), [2, 6, 12])


# ----------------------------------------------------------------------------- layers


@every_layer
def test_arguments_are_hashable_attributes(cls):
    layer = cls([2, np.int64(3)], np.array([1, 2]), [[1, 0], np.int64(1)])
    attributes = (layer.window_shape, layer.strides, layer.padding)
    assert attributes == ((2, 3), (1, 2), ((1, 0), 1))
    assert hash(attributes) is not None
    same = cls((2, 3), (1, 2), ((1, 0), 1))
    assert nnx.graphdef(layer) == nnx.graphdef(same)
    assert not nnx.to_flat_state(nnx.state(layer))


@every_global
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_global_pooling_reduces_all_spatial_axes(cls, dtype):
    x = (20 * random_arrays.random(2, 5, 6, 3)).astype(dtype)
    y = cls()(x)
    expected = GLOBAL[cls](np.float64(x), (1, 2))
    assert y.shape == (2, 3)
    is_average = cls is nnx.GlobalAvgPool
    assert y.dtype == (jnp.float32 if is_average and dtype == jnp.int8 else dtype)
    rtol = 1e-2 if dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(np.float64(y), expected, rtol=rtol, atol=2e-2)


@every_global
@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_number_of_spatial_axes_frees_the_batch_axes(cls, batch):
    x = random_arrays.random(*batch, 5, 6, 3)
    expected = GLOBAL[cls](np.float64(x), (-3, -2))
    np.testing.assert_allclose(cls(2)(x), expected, rtol=1e-5, atol=1e-6)


@every_global
@tables.cases("number, shape", (None, (4, 3)), (None, (3,)), (2, (5, 3)), (1, (3,)))
def test_inputs_without_spatial_axes_are_refused(cls, number, shape):
    x = random_arrays.random(*shape)
    where = f"at {cls.__name__}\n  inputs: {jax.typeof(x)}"
    with raises(ValueError, f"num_spatial_axes={number} found no spatial axes", where):
        cls(number)(x)
    for number in (0, -1):
        with pytest.raises(ValueError, match=f"{cls.__name__} needs a positive"):
            cls(number)
    with pytest.raises(TypeError, match="Only arrays of numeric types"):
        cls()("image")
