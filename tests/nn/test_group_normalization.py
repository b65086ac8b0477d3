"""GroupNorm and InstanceNorm against NumPy in float64."""

import functools

import numpy as np
import pytest

import graftree as nnx
from tests import random_arrays
from tests.programs import in_one_program

random = functools.partial(random_arrays.random, mean=3, scale=2)


def standardized(x, axes, mask=True):
    x = np.float64(x)
    mask = np.broadcast_to(mask, x.shape)
    mean = x.mean(axes, keepdims=True, where=mask)
    variance = x.var(axes, keepdims=True, where=mask)
    return (x - mean) / np.sqrt(variance + 1e-6)


@pytest.mark.parametrize("shape", [(2, 6), (2, 5, 6), (2, 3, 4, 6)])
@pytest.mark.parametrize("sizes", [(2, None), (None, 3), (3, None), (1, None)])
def test_group_norm_standardizes_each_group(shape, sizes):
    layer = nnx.GroupNorm(6, *sizes, rngs=nnx.Rngs(0))
    x = random(*shape)
    grouped = np.reshape(x, (*shape[:-1], layer.num_groups, layer.group_size))
    axes = tuple(a for a in range(1, x.ndim + 1) if a != x.ndim - 1)
    expected = standardized(grouped, axes).reshape(shape)
    np.testing.assert_allclose(in_one_program(layer, x), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("reduction_axes", "grouped_axes"),
    [
        ((-3, -2, -1), (2, 3, 5)),
        ((2, -1), (2, 5)),
        ((4,), (5,)),
        (-1, (5,)),
        ((0, 1, 2, 3, 4), (0, 1, 2, 3, 5)),
    ],
)
def test_reduction_axes_may_keep_any_other_axis(reduction_axes, grouped_axes):
    layer = nnx.GroupNorm(6, 2, reduction_axes=reduction_axes, rngs=nnx.Rngs(0))
    x = random(2, 3, 4, 5, 6)
    expected = standardized(np.reshape(x, (2, 3, 4, 5, 2, 3)), grouped_axes).reshape(
        x.shape
    )
    np.testing.assert_allclose(in_one_program(layer, x), expected, atol=1e-3)


def test_a_single_vector_is_normalized_by_groups():
    layer = nnx.GroupNorm(6, 2, rngs=nnx.Rngs(0))
    expected = standardized(np.reshape(random(6), (2, 3)), (1,)).reshape(6)
    np.testing.assert_allclose(in_one_program(layer, random(6)), expected, atol=1e-4)


def test_reduction_axes_must_include_the_last():
    layer = nnx.GroupNorm(6, 2, reduction_axes=(1,), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="must include the last axis"):
        layer(random(2, 3, 6))


def test_one_group_is_layer_norm_and_groups_of_one_are_instance_norm():
    x = random(2, 3, 4, 6)
    layer_norm = nnx.LayerNorm(6, reduction_axes=(1, 2, 3), rngs=nnx.Rngs(0))
    np.testing.assert_allclose(
        nnx.GroupNorm(6, 1, rngs=nnx.Rngs(0))(x),
        in_one_program(layer_norm, x),
        rtol=1e-5,
        atol=1e-6,
    )
    instance_norm = nnx.InstanceNorm(6, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(
        nnx.GroupNorm(6, 6, rngs=nnx.Rngs(0))(x), instance_norm(x), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("features", [1, 6])
def test_mask_selects_what_counts(features):
    layer = nnx.GroupNorm(6, 2, rngs=nnx.Rngs(0))
    mask = random_arrays.random_mask(2, 5, features)
    mask = mask.at[:, 0].set(True)
    x = random(2, 5, 6)
    grouped = np.broadcast_to(mask, x.shape).reshape(2, 5, 2, 3)
    expected = standardized(np.reshape(x, (2, 5, 2, 3)), (1, 3), grouped).reshape(
        x.shape
    )
    np.testing.assert_allclose(in_one_program(layer, x, mask=mask), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((32, 2), "Either `num_groups` or `group_size` should be specified"),
        ((None, None), "Either `num_groups` or `group_size` should be specified"),
        ((None, 4), "not multiple of the group size"),
        ((None, 0), "not multiple of the group size"),
        ((4, None), "does not divide the number"),
        ((0, None), "does not divide the number"),
        ((-2, None), "does not divide the number"),
        ((2.0, None), "does not divide the number"),
    ],
)
def test_groups_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        nnx.GroupNorm(6, *sizes, rngs=nnx.Rngs(0))


def test_default_of_32_groups_needs_a_multiple_of_32_features():
    assert nnx.GroupNorm(64, rngs=nnx.Rngs(0)).group_size == 2
    with pytest.raises(ValueError, match=r"groups \(32\) does not divide.*\(6\)"):
        nnx.GroupNorm(6, rngs=nnx.Rngs(0))


def test_group_norm_knows_its_number_of_features():
    assert nnx.GroupNorm(6, 2, use_scale=False, rngs=nnx.Rngs(0)).num_features == 6


def test_wrong_number_of_features_is_an_error():
    with pytest.raises(TypeError):
        nnx.GroupNorm(6, 2, rngs=nnx.Rngs(0))(random(2, 8))


@pytest.mark.parametrize(
    ("feature_axes", "axes"), [(-1, (1, 2)), ((2, -1), (1,)), ((1,), (2, 3))]
)
def test_instance_norm_standardizes_over_the_positions(feature_axes, axes):
    x = random(2, 4, 3, 6)
    sizes = [x.shape[a] for a in np.ravel(feature_axes)]
    layer = nnx.InstanceNorm(
        np.prod(sizes), feature_axes=feature_axes, rngs=nnx.Rngs(0)
    )
    np.testing.assert_allclose(
        in_one_program(layer, x), standardized(x, axes), atol=1e-4
    )


@pytest.mark.parametrize("feature_axes", [0, -3, (0, 2)])
def test_instance_norm_keeps_the_first_axis_for_the_batch(feature_axes):
    layer = nnx.InstanceNorm(6, feature_axes=feature_axes, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="cannot include the leading dimension"):
        layer(random(2, 4, 6))


@pytest.mark.peers
@pytest.mark.parametrize("sizes", [(3, None), (None, 3)])
@pytest.mark.parametrize("reduction_axes", [None, (1, 2, 3), (-1, -2, -3)])
def test_group_norm_equals_the_peer(peer, sizes, reduction_axes):
    args, options = (6, *sizes), {"reduction_axes": reduction_axes}
    ours = nnx.GroupNorm(*args, **options, rngs=nnx.Rngs(0))
    theirs = peer.GroupNorm(*args, **options, rngs=peer.Rngs(0))
    x = random(2, 3, 4, 6)
    expected = peer.jit(lambda layer: layer(x))(theirs)
    np.testing.assert_allclose(in_one_program(ours, x), expected, rtol=1e-5, atol=1e-6)
