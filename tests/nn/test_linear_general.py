"""LinearGeneral against NumPy: which axes meet which."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests.random_arrays import random


def make(*args, **options):
    normal = nnx.initializers.normal()
    return nnx.LinearGeneral(*args, bias_init=normal, rngs=nnx.Rngs(0), **options)


def float64(layer):
    return np.float64(layer.kernel[...]), np.float64(layer.bias[...])


def test_one_axis_is_linear():
    general, linear = make(2, 4), nnx.Linear(2, 4, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(general.kernel[...], linear.kernel[...])
    linear.bias[...] = general.bias[...]
    x = random(3, 2)
    np.testing.assert_array_equal(general(x), linear(x))


@pytest.mark.parametrize("axis", [(-2, -1), (1, 2), (-1, -2), (2, -2)])
def test_several_axes_are_contracted_in_ascending_order(axis):
    layer = make((2, 3), (4, 5), axis=axis)
    kernel, bias = float64(layer)
    x = random(7, 2, 3)
    expected = np.einsum("nab,abcd->ncd", np.float64(x), kernel) + bias
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-6)


def test_axes_in_front_may_be_contracted():
    layer = make((7, 3), 4, axis=(0, 2))
    kernel, bias = float64(layer)
    expected = np.einsum("nab,nbc->ac", np.float64(random(7, 2, 3)), kernel) + bias
    np.testing.assert_allclose(layer(random(7, 2, 3)), expected, rtol=1e-5, atol=1e-6)


def test_batch_axes_have_their_own_kernel_and_bias():
    layer = make(3, (4, 5), axis=-1, batch_axis={0: 7, 1: 2})
    assert layer.kernel.shape == (7, 2, 3, 4, 5)
    assert layer.bias.shape == (7, 2, 4, 5)
    kernel, bias = float64(layer)
    x = random(7, 2, 6, 3)
    expected = np.einsum("nmta,nmacd->nmtcd", np.float64(x), kernel)
    expected += bias[:, :, None]
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-6)


def test_initializers_get_the_flattened_shapes():
    shapes = []

    def init(key, shape, dtype):
        shapes.append(shape)
        return jnp.ones(shape, dtype)

    options = {"kernel_init": init, "bias_init": init, "batch_axis": {0: 6}}
    nnx.LinearGeneral((2, 3), (4, 5), axis=(1, 2), rngs=nnx.Rngs(0), **options)
    assert shapes == [(36, 20), (120,)]


def test_values_with_metadata_are_reshaped_too():
    init = nnx.with_metadata(nnx.initializers.lecun_normal(), tag="kernel")
    layer = nnx.LinearGeneral(2, (3, 4), kernel_init=init, rngs=nnx.Rngs(0))
    assert layer.kernel.shape == (2, 3, 4)
    assert layer.kernel.tag == "kernel"


def test_lengths_of_features_and_axes_must_agree():
    message = r"must have the same length. Got \(2, 3\) and \(-1,\)"
    with pytest.raises(ValueError, match=message):
        make((2, 3), 4)


@pytest.mark.parametrize("batch_axis", [{1: 3}, {-1: 3}, {0: 3, 2: 4}])
def test_batch_axes_must_lead(batch_axis):
    message = "consecutive leading dimensions starting from 0"
    with pytest.raises(ValueError, match=message):
        make(2, 4, batch_axis=batch_axis)


@pytest.mark.parametrize("axis", [(1, 1), (-1, 1)])
def test_an_axis_can_not_be_contracted_twice(axis):
    with pytest.raises(TypeError):
        make((2, 2), 4, axis=axis)(random(3, 2))


def test_arguments_are_kept_as_tuples_and_an_immutable_mapping():
    layer = make([2], np.int64(4), axis=[-1], batch_axis={0: 3})
    assert (layer.in_features, layer.out_features, layer.axis) == ((2,), (4,), (-1,))
    assert dict(layer.batch_axis) == {0: 3}
    with pytest.raises(TypeError):
        layer.batch_axis[1] = 2


def test_contraction_is_chosen_by_class_then_function():
    calls = []

    def recorder(name):
        def dot_general(*args, **kwargs):
            calls.append((name, args[2], kwargs))
            return jax.lax.dot_general(*args, **kwargs)

        return dot_general

    function = recorder("function")
    make(2, 4, dot_general=function)(random(3, 2))
    numbers = (((1,), (0,)), ((), ()))
    assert calls.pop() == ("function", numbers, {"precision": None})
    make(2, 4, dot_general=function, dot_general_cls=lambda: recorder("class"))(
        random(3, 2)
    )
    assert [name for name, *_ in calls] == ["class"]


@pytest.mark.peers
@pytest.mark.parametrize(
    ("batch", "dtypes"),
    list(itertools.product([{}, {0: 6}], [{}, {"dtype": jnp.bfloat16}])),
)
@pytest.mark.parametrize("use_bias", [True, False])
def test_linear_general_equals_the_peer(peer, batch, dtypes, use_bias):
    options = {"axis": (1, -1), "batch_axis": batch, "use_bias": use_bias, **dtypes}
    ours = nnx.LinearGeneral((2, 4), (5, 3), **options, rngs=nnx.Rngs(1))
    theirs = peer.LinearGeneral((2, 4), (5, 3), **options, rngs=peer.Rngs(1))
    np.testing.assert_array_equal(ours.kernel[...], theirs.kernel[...])
    x = random(6, 2, 3, 4)
    assert ours(x).dtype == theirs(x).dtype
    assert math.prod(ours(x).shape) == 6 * 3 * 5 * 3
    np.testing.assert_allclose(
        np.float32(ours(x)), np.float32(theirs(x)), rtol=1e-5, atol=1e-6
    )
