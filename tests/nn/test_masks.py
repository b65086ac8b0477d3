"""Attention masks: their shapes, their entries, what they refuse."""

import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests.random_arrays import random_mask


@pytest.mark.parametrize(("batch", "extra"), [((), 0), ((2,), 1), ((2, 3), 2)])
def test_shape_has_a_head_axis_after_the_batch_and_extra_axes_before(batch, extra):
    queries, keys = jnp.ones((*batch, 4)), jnp.ones((*batch, 5))
    mask = nnx.make_attention_mask(queries, keys, extra_batch_dims=extra)
    assert mask.shape == (1,) * extra + (*batch, 1, 4, 5)
    causal = nnx.make_causal_mask(keys, extra_batch_dims=extra)
    assert causal.shape == (1,) * extra + (*batch, 1, 5, 5)


def test_attention_mask_compares_each_query_with_each_key():
    documents = jnp.array([[0, 0, 1], [0, 1, 1]])
    mask = nnx.make_attention_mask(documents, documents, jnp.equal, dtype=bool)
    for b, i, j in np.ndindex(2, 3, 3):
        assert mask[b, 0, i, j] == (documents[b, i] == documents[b, j])


def test_attention_mask_multiplies_by_default():
    mask = nnx.make_attention_mask(jnp.array([1, 0]), jnp.array([1, 1, 0]))
    np.testing.assert_array_equal(mask, [[[1, 1, 0], [0, 0, 0]]])
    assert mask.dtype == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, bool])
def test_causal_mask_is_lower_triangular_in_the_dtype(dtype):
    mask = nnx.make_causal_mask(jnp.zeros((2, 4)), dtype=dtype)
    assert mask.dtype == dtype
    np.testing.assert_array_equal(mask, np.tril(np.ones((2, 1, 4, 4), dtype)))


def test_combined_mask_is_the_logical_and():
    masks = [random_mask(2, 1, 3, 4, seed=n) for n in range(2)]
    expected = np.logical_and.reduce(masks)
    combined = nnx.combine_masks(None, *masks, None)
    np.testing.assert_array_equal(combined, expected)
    assert combined.dtype == jnp.float32


def test_masks_to_combine_broadcast():
    causal = nnx.make_causal_mask(jnp.ones((1, 3)))
    padding = jnp.array([True, True, False]).reshape(1, 1, 1, 3)
    combined = nnx.combine_masks(causal, padding, dtype=bool)
    expected = [[True, False, False], [True, True, False], [True, True, False]]
    np.testing.assert_array_equal(combined[0, 0], expected)


def test_a_single_mask_is_cast():
    assert nnx.combine_masks(jnp.ones((2, 3), bool)).dtype == jnp.float32
    assert nnx.combine_masks(jnp.full((2, 3), 7), dtype=bool).dtype == bool


def test_no_masks_combine_to_none():
    assert nnx.combine_masks() is None
    assert nnx.combine_masks(None, None) is None


def test_masks_of_different_rank_are_refused():
    with pytest.raises(ValueError, match=r"masks must have same rank.*\(4, 3\)"):
        nnx.combine_masks(jnp.ones((1, 1, 2, 2)), None, jnp.ones((1, 2, 2)))
