"""ConvTranspose against sums of kernel copies, the transpose, and the peer."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests.random_arrays import random


def full(x, kernel, stride, dilation):
    """The sum of kernel copies, in float64; one spatial axis, kernel not flipped.

    As everywhere in deep learning it is the correlation that is transposed: without
    ``transpose_kernel`` copies of the flipped kernel are added.
    """
    x, kernel = np.float64(x), np.float64(kernel)[::-1]
    extent = (kernel.shape[0] - 1) * dilation + 1
    length = x.shape[1] * stride + max(extent - stride, 0)
    y = np.zeros((x.shape[0], length, kernel.shape[-1]))
    for at, tap in itertools.product(range(x.shape[1]), range(kernel.shape[0])):
        y[:, at * stride + tap * dilation] += x[:, at] @ kernel[tap]
    return y


@pytest.mark.parametrize(
    ("size", "stride", "dilation"), [(3, 1, 1), (3, 2, 1), (2, 3, 1), (3, 2, 2)]
)
def test_valid_is_the_sum_of_all_copies(size, stride, dilation):
    layer = nnx.ConvTranspose(
        2,
        3,
        size,
        stride,
        padding="VALID",
        kernel_dilation=dilation,
        rngs=nnx.Rngs(0),
    )
    x = random(2, 5, 2)
    expected = full(x, layer.kernel[...], stride, dilation)
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stride", [None, 1, 2, 3])
@pytest.mark.parametrize("padding", ["SAME", "CIRCULAR"])
def test_outputs_are_strides_times_as_long(stride, padding):
    layer = nnx.ConvTranspose(2, 3, (4, 3), stride, padding=padding, rngs=nnx.Rngs(0))
    factor = stride or 1
    y = nnx.eval_shape(layer, random(2, 5, 4, 2))
    assert y.shape == (2, 5 * factor, 4 * factor, 3)


@pytest.mark.parametrize(
    ("transpose_kernel", "expected"),
    [(False, [3, 2, 1, 0, 0, 0, 0, 0]), (True, [2, 3, 0, 0, 0, 0, 0, 1])],
)
def test_circular_example_of_the_contract(transpose_kernel, expected):
    options = {"padding": "CIRCULAR", "transpose_kernel": transpose_kernel}
    layer = nnx.ConvTranspose(1, 1, 3, 2, **options, rngs=nnx.Rngs(0))
    layer.kernel[...] = jnp.array([1.0, 2.0, 3.0]).reshape(3, 1, 1)
    y = layer(jnp.array([1.0, 0.0, 0.0, 0.0]).reshape(1, 4, 1))
    np.testing.assert_array_equal(y.ravel(), expected)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_circular_outputs_follow_a_rotation_of_the_inputs(size):
    layer = nnx.ConvTranspose(2, 3, size, 2, padding="CIRCULAR", rngs=nnx.Rngs(0))
    x = random(1, 5, 2)
    rotated = layer(jnp.roll(x, 1, axis=1))
    np.testing.assert_allclose(rotated, jnp.roll(layer(x), 2, axis=1), atol=1e-5)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_transposed_kernel_gives_the_transpose_of_the_convolution(padding, stride):
    options = {"padding": padding, "use_bias": False, "rngs": nnx.Rngs(0)}
    down = nnx.Conv(2, 3, 3, stride, **options)
    up = nnx.ConvTranspose(3, 2, 3, stride, transpose_kernel=True, **options)
    up.kernel[...] = down.kernel[...]
    # An odd number of windows, so that strides divide evenly.
    length = 6 if padding == "SAME" else 2 * stride + 3
    x = random(1, length, 2)
    y = random(1, *down(x).shape[1:])
    _, pull_back = jax.vjp(down, x)
    np.testing.assert_allclose(up(y), pull_back(y)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (0,)])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_any_number_of_batch_and_spatial_axes(batch, rank):
    layer = nnx.ConvTranspose(2, 3, (2,) * rank, rngs=nnx.Rngs(0))
    y = nnx.eval_shape(layer, random(*batch, *(3,) * rank, 2))
    assert y.shape == (*batch, *(3,) * rank, 3)


def test_bias_is_added_once_after_the_fold():
    options = {"padding": "CIRCULAR", "bias_init": nnx.initializers.ones}
    layer = nnx.ConvTranspose(1, 1, 5, **options, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(layer(jnp.zeros((1, 3, 1))), jnp.ones((1, 3, 1)))


def test_mask_is_multiplied_with_the_kernel():
    mask = jnp.array([0, 1, 1]).reshape(3, 1, 1) * jnp.ones((3, 2, 4))
    layer = nnx.ConvTranspose(2, 4, 3, mask=mask, rngs=nnx.Rngs(0))
    plain = nnx.ConvTranspose(2, 4, 3, rngs=nnx.Rngs(0))
    plain.kernel[...] *= mask
    x = random(1, 5, 2)
    np.testing.assert_array_equal(layer(x), plain(x))
    layer.mask = jnp.ones((3, 2, 5))
    with pytest.raises(ValueError, match="Mask needs to have the same shape"):
        layer(x)


def test_inputs_with_too_few_axes_are_named():
    layer = nnx.ConvTranspose(2, 3, (3, 3), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"ConvTranspose.*at least 3 axes"):
        layer(jnp.ones((5, 2)))


@pytest.mark.peers
@pytest.mark.parametrize("padding", ["SAME", "VALID", "CIRCULAR", 1, [(0, 2)]])
@pytest.mark.parametrize("strides", [None, 2, (3,)])
@pytest.mark.parametrize("transpose_kernel", [True, False])
def test_conv_transpose_equals_the_peer(peer, padding, strides, transpose_kernel):
    args, options = (2, 3, (4,), strides), {"padding": padding}
    options |= {"transpose_kernel": transpose_kernel, "kernel_dilation": 2}
    ours = nnx.ConvTranspose(*args, **options, rngs=nnx.Rngs(0))
    theirs = peer.ConvTranspose(*args, **options, rngs=peer.Rngs(0))
    np.testing.assert_array_equal(ours.kernel[...], theirs.kernel[...])
    x = random(2, 5, 2)
    np.testing.assert_allclose(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
