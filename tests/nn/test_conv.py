"""Conv and ConvTranspose: forms of arguments, padding, masks, batch axes, hooks.

Their formulas are in `test_formulas.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests.programs import in_one_program
from tests.random_arrays import random

BOTH = pytest.mark.parametrize("cls", [nnx.Conv, nnx.ConvTranspose])


def conv(*args, **options):
    return nnx.Conv(*args, **options, rngs=nnx.Rngs(0))


def transpose(*args, **options):
    return nnx.ConvTranspose(*args, **options, rngs=nnx.Rngs(0))


# -------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("padding", "pairs"),
    [
        (1, ((1, 1), (1, 1))),
        (np.int64(2), ((2, 2), (2, 2))),
        ([2, 0], ((2, 2), (0, 0))),
        ([1, (0, 2)], ((1, 1), (0, 2))),
        ([[1, 2], [0, 1]], ((1, 2), (0, 1))),
        (np.array([[1, 2], [1, 1]]), ((1, 2), (1, 1))),
    ],
)
def test_explicit_padding_has_many_forms(padding, pairs):
    x = random(1, 5, 4, 2)
    y, same = (conv(2, 3, [3, 2], padding=p)(x) for p in (padding, pairs))
    np.testing.assert_array_equal(y, same)


@pytest.mark.parametrize("padding", [(1, 2), ((1, 2, 3),), (None,), 1.5, ("a",), None])
def test_unknown_padding_is_named(padding):
    with pytest.raises(ValueError, match="Invalid padding format.*len 1"):
        conv(2, 3, (3,), padding=padding)(jnp.ones((1, 5, 2)))


def test_names_of_padding_that_do_not_fit_are_refused():
    with pytest.raises(RuntimeError, match="FOO"):
        conv(2, 3, (3,), padding="FOO")(jnp.ones((1, 5, 2)))
    with pytest.raises(ValueError, match="Causal padding is only implemented for 1D"):
        conv(2, 3, (3, 3), padding="CAUSAL")(jnp.ones((1, 5, 5, 2)))


@pytest.mark.parametrize("kernel_size", [3, np.int64(3), [3], (np.int32(3),)])
def test_kernel_size_takes_ints_and_sequences(kernel_size):
    layer = conv(4, 6, kernel_size, feature_group_count=2)
    assert layer.kernel_size == (3,) and type(layer.kernel_size[0]) is int
    assert layer.kernel.shape == layer.kernel_shape == (3, 2, 6)


@pytest.mark.parametrize("kernel_size", ["ab", 1.5, [1.5]])
def test_kernel_size_that_is_no_int_is_refused(kernel_size):
    with pytest.raises(TypeError):
        conv(2, 3, kernel_size)


def test_strides_and_dilations_of_none_mean_one():
    x = random(1, 5, 2)
    given = conv(2, 3, 3, None, input_dilation=None, kernel_dilation=None)
    np.testing.assert_array_equal(given(x), conv(2, 3, 3)(x))


def test_arguments_are_kept_as_given():
    layer = conv(2, 3, [3], [2], padding=[1], kernel_dilation=2)
    kept = layer.strides, layer.padding, layer.kernel_dilation
    assert kept == ([2], [1], 2)


def test_groups_must_divide_the_channels():
    layer = conv(3, 4, 3, feature_group_count=2)
    with pytest.raises(AssertionError, match="feature_group_count=2.*in_features=3"):
        layer(jnp.ones((1, 5, 3)))


# ------------------------------------------------------------------------------ calls


@pytest.mark.parametrize("batch", [(), (3,), (0,), (2, 3)])
@pytest.mark.parametrize("size", [(3,), (3, 2), (2, 2, 2, 2)])
@BOTH
def test_any_number_of_batch_and_spatial_axes(cls, size, batch):
    layer = cls(2, 3, size, rngs=nnx.Rngs(0))
    space = (5, 4, 3, 2)[: len(size)]
    outputs = nnx.eval_shape(layer, jnp.ones((*batch, *space, 2)))
    assert outputs.shape == (*batch, *space, 3)


@BOTH
def test_batch_axes_are_independent(cls):
    layer, x = cls(2, 3, (3,), rngs=nnx.Rngs(0)), random(2, 3, 5, 2)
    y = in_one_program(layer, x)
    assert y.shape == (2, 3, 5, 3)
    one = in_one_program(layer, x[1, 2])
    np.testing.assert_allclose(y[1, 2], one, rtol=1e-5, atol=1e-6)


def test_causal_outputs_do_not_see_later_inputs():
    layer = conv(1, 1, 3, padding="CAUSAL", kernel_dilation=2)
    jacobian = jax.jit(jax.jacobian(lambda x: layer(x[:, None])[:, 0]))(jnp.ones(6))
    np.testing.assert_array_equal(np.triu(jacobian, 1), np.zeros((6, 6)))


@BOTH
def test_mask_is_multiplied_with_the_kernel_and_is_a_leaf(cls):
    mask = jnp.asarray(np.arange(24).reshape(3, 2, 4) % 3 > 0, float)
    layer, plain = (
        cls(2, 4, 3, mask=m, rngs=nnx.Rngs(0), bias_init=nnx.initializers.ones)
        for m in (mask, None)
    )
    kernel = layer.kernel[...]
    plain.kernel[...] = kernel * mask
    x = random(1, 6, 2)
    np.testing.assert_array_equal(layer(x), plain(x))
    np.testing.assert_array_equal(layer.kernel[...], kernel)
    assert nnx.state(layer)["mask"] is mask
    layer.mask = jnp.ones((3, 2, 5))
    message = r"Mask needs to have the same shape as weights.*\(3, 2, 5\), \(3, 2, 4\)"
    with pytest.raises(ValueError, match=message):
        layer(x)


# --------------------------------------------------------------------- ConvTranspose


@pytest.mark.parametrize("stride", [None, 1, 2, 3])
@pytest.mark.parametrize("padding", ["SAME", "CIRCULAR"])
def test_outputs_are_strides_times_as_long(stride, padding):
    layer = transpose(2, 3, (4, 3), stride, padding=padding)
    factor = stride or 1
    y = nnx.eval_shape(layer, random(2, 5, 4, 2))
    assert y.shape == (2, 5 * factor, 4 * factor, 3)


@pytest.mark.parametrize(
    ("transpose_kernel", "expected"),
    [(False, [3, 2, 1, 0, 0, 0, 0, 0]), (True, [2, 3, 0, 0, 0, 0, 0, 1])],
)
def test_circular_example_of_the_contract(transpose_kernel, expected):
    options = {"padding": "CIRCULAR", "transpose_kernel": transpose_kernel}
    layer = transpose(1, 1, 3, 2, **options)
    layer.kernel[...] = jnp.array([1.0, 2.0, 3.0]).reshape(3, 1, 1)
    y = layer(jnp.array([1.0, 0.0, 0.0, 0.0]).reshape(1, 4, 1))
    np.testing.assert_array_equal(y.ravel(), expected)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_circular_outputs_follow_a_rotation_of_the_inputs(size):
    layer, x = transpose(2, 3, size, 2, padding="CIRCULAR"), random(1, 5, 2)
    y = in_one_program(layer, x)
    rotated = in_one_program(layer, jnp.roll(x, 1, axis=1))
    np.testing.assert_allclose(rotated, np.roll(y, 2, axis=1), atol=1e-5)


def test_bias_is_added_once_after_the_fold():
    options = {"padding": "CIRCULAR", "bias_init": nnx.initializers.ones}
    layer = transpose(1, 1, 5, **options)
    np.testing.assert_array_equal(layer(jnp.zeros((1, 3, 1))), jnp.ones((1, 3, 1)))
