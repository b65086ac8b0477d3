"""Pooling as layers: the same numbers as the functions, and as NumPy over all axes."""

import pickle

import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx

WINDOWS = {
    nnx.MaxPool: nnx.max_pool,
    nnx.MinPool: nnx.min_pool,
    nnx.AvgPool: nnx.avg_pool,
}
GLOBAL = {
    nnx.GlobalMaxPool: np.max,
    nnx.GlobalMinPool: np.min,
    nnx.GlobalAvgPool: np.mean,
}
every_window = pytest.mark.parametrize("cls", WINDOWS)
every_global = pytest.mark.parametrize("cls", GLOBAL)


def random(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@every_window
@pytest.mark.parametrize(
    "args",
    [
        (2, 2),
        ([2, 2], [1, 2], "SAME"),
        ((2, 2), None, [[1, 0], 1]),
        (np.int64(2), np.array([2, 1]), np.int32(1)),
    ],
)
def test_layers_do_what_the_functions_do(cls, args):
    x = random(2, 5, 6, 3)
    np.testing.assert_array_equal(cls(*args)(x), WINDOWS[cls](x, *args))


@pytest.mark.parametrize("count_include_pad", [True, False])
def test_padding_counts_in_averages_if_asked(count_include_pad):
    args = (2, 2, "SAME", count_include_pad)
    x = random(2, 5, 3)
    np.testing.assert_array_equal(nnx.AvgPool(*args)(x), nnx.avg_pool(x, *args))


@every_window
def test_arguments_are_hashable_attributes(cls):
    layer = cls([2, np.int64(3)], np.array([1, 2]), [[1, 0], np.int64(1)])
    attributes = (layer.window_shape, layer.strides, layer.padding)
    assert attributes == ((2, 3), (1, 2), ((1, 0), 1))
    assert hash(attributes) is not None
    same = cls((2, 3), (1, 2), ((1, 0), 1))
    assert nnx.graphdef(layer) == nnx.graphdef(same)
    assert not nnx.to_flat_state(nnx.state(layer))


@every_window
def test_wrong_lengths_are_refused(cls):
    with pytest.raises(AssertionError, match="window_shape"):
        cls((2, 2, 2))(random(1, 6, 2))


@every_global
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_global_pooling_reduces_all_spatial_axes(cls, dtype):
    x = (20 * random(2, 5, 6, 3)).astype(dtype)
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
    x = random(*batch, 5, 6, 3)
    y = cls(num_spatial_axes=2)(x)
    expected = GLOBAL[cls](np.float64(x), (-3, -2))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@every_global
@pytest.mark.parametrize(
    ("number", "shape"), [(None, (4, 3)), (None, (3,)), (2, (5, 3)), (1, (3,))]
)
def test_inputs_without_spatial_axes_are_refused(cls, number, shape):
    message = f"num_spatial_axes={number} found no spatial axes"
    with pytest.raises(ValueError, match=message) as info:
        cls(number)(random(*shape))
    assert f"at {cls.__name__}\n  inputs: float32{list(shape)}" in info.value.__notes__


@every_global
@pytest.mark.parametrize("number", [0, -1])
def test_number_of_spatial_axes_is_positive(cls, number):
    with pytest.raises(ValueError, match=f"{cls.__name__} needs a positive"):
        cls(number)


@every_global
def test_inputs_must_be_numbers(cls):
    with pytest.raises(TypeError, match="Only arrays of numeric types"):
        cls()("image")


def test_pooling_layers_work_in_models_and_transforms(graph):
    model = nnx.Sequential(
        nnx.MaxPool(2, strides=2),
        nnx.AvgPool(2),
        nnx.GlobalAvgPool(),
        nnx.Linear(3, 1, rngs=nnx.Rngs(0)),
    )
    x = random(2, 8, 8, 3)
    jitted = nnx.jit(lambda m, x: m(x), graph=graph)
    np.testing.assert_allclose(jitted(model, x), model(x), rtol=1e-5, atol=1e-6)
    copy = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(copy(x), model(x))
