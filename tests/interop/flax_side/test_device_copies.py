"""Batches wait on the devices."""

import itertools

import jax
import numpy as np
import pytest

from graftree.interop.flax_side import device_copies


def test_lists_are_batches_too_and_each_comes_once():
    batches = [np.full(2, i) for i in range(3)]
    found = device_copies.prefetch_to_device(batches, 2, jax.devices()[:2])
    assert [int(batch[0]) for batch in itertools.islice(found, 5)] == [0, 1, 2]


def test_a_size_without_batches_is_refused():
    with pytest.raises(ValueError, match="size=0"):
        device_copies.prefetch_to_device([], 0)


def test_copies_are_one_per_device():
    two = jax.devices()[:2]
    copies = device_copies.replicate({"w": np.ones(3, np.float32)}, two)["w"]
    assert [shard.device for shard in copies.addressable_shards] == two
    np.testing.assert_array_equal(copies, np.ones((2, 3)))
