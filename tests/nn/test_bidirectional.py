"""Bidirectional: both directions, how they are merged, and which keys they draw."""

import functools
import logging
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests.random_arrays import random


def make(**options):
    cells = [nnx.LSTMCell(2, 3, rngs=nnx.Rngs(seed)) for seed in (0, 1)]
    return nnx.Bidirectional(*map(nnx.RNN, cells), **options)


normal = functools.partial(random, seed=1)


@pytest.mark.parametrize(("time_major", "lengths"), [(True, None), (False, [3, 1])])
def test_each_direction_is_an_rnn_of_its_own(time_major, lengths):
    both = make(time_major=time_major)
    x = normal(4, 2, 2) if time_major else normal(2, 4, 2)
    options = {"time_major": time_major, "seq_lengths": lengths, "return_carry": True}
    first, a = both.forward_rnn(x, **options)
    last, b = both.backward_rnn(x, reverse=True, keep_order=True, **options)
    carries, y = both(x, seq_lengths=lengths, return_carry=True)
    np.testing.assert_array_equal(y, jnp.concatenate([a, b], -1))
    jax.tree.map(np.testing.assert_array_equal, carries, (first, last))
    ignored = both(x, seq_lengths=lengths, reverse=True, keep_order=False)
    np.testing.assert_array_equal(ignored, y)


def test_outputs_are_merged_leaf_by_leaf():
    both, x = make(), normal(2, 4, 2)
    total = make(merge_fn=jnp.add)(x)
    np.testing.assert_allclose(total, sum(jnp.split(both(x), 2, -1)), rtol=1e-6)


def test_the_first_carries_are_a_pair():
    both, x = make(return_carry=True), normal(2, 4, 2)
    pair = both.forward_rnn.cell.initialize_carry((2, 2), nnx.Rngs(0))
    (_, (c, _)), _ = both(x, initial_carry=(pair, pair))
    assert c.shape == (2, 3)
    both.rngs.count[...] = 0
    for wrong in (pair[0], (pair,), {"a": pair}):
        with pytest.raises(ValueError, match="initial_carry must be a pair"):
            both(x, initial_carry=wrong)
    assert both.rngs.count[...] == 0


def test_one_stream_gives_the_keys_of_both_forward_first():
    both, x = make(), normal(1, 4, 2)
    both(x)
    inner = (both.forward_rnn.rngs, both.backward_rnn.rngs)
    assert both.rngs.count[...] == 4
    assert [int(stream.count[...]) for stream in inner] == [0, 0]
    rngs = nnx.Rngs(carry=0)
    both(x, rngs=rngs)
    both(x, rngs=rngs.carry)
    assert (rngs.carry.count[...], both.rngs.count[...]) == (8, 4)
    without = make(rngs=False)
    without(x)
    assert without.forward_rnn.rngs.count[...] == 2


def test_rngs_are_made_kept_or_left_out():
    stream = nnx.RngStream(3, tag="any")
    assert make(rngs=stream).rngs is stream
    assert (make().rngs.tag, make().rngs.key[...]) == ("carry", jax.random.key(0))
    absent = make(rngs=False)
    assert absent.rngs is None
    with pytest.raises(ValueError, match="static attribute"):
        absent.rngs = stream
    for wrong in (0, None, jax.random.key(0)):
        with pytest.raises(TypeError, match="rngs must be a Rngs"):
            make(rngs=wrong)


def test_one_network_for_both_directions_is_logged(caplog):
    network = nnx.RNN(nnx.GRUCell(2, 3, rngs=nnx.Rngs(0)))
    with caplog.at_level(logging.WARNING, logger="absl"):
        both = nnx.Bidirectional(network, network)
    assert "same object" in caplog.text and "share" in caplog.text
    assert both(normal(1, 4, 2)).shape == (1, 4, 6)


def test_it_may_be_closed_over_and_pickled():
    both, x = make(), normal(2, 4, 2)
    expected = both(x)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(both))(x), expected)
    count = both.rngs.count[...]
    y = jax.jit(lambda x: both(x))(x)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    assert both.rngs.count[...] == count
