"""Samplers: which tokens are left to choose from, and how often each is chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from graftree.decoding import sampling

LOGITS = jnp.log(jnp.array([0.1, 0.4, 0.2, 0.3]))


def drawn(sampler, logits=LOGITS, count=4000):
    rows = jnp.broadcast_to(logits, (count, len(logits)))
    tokens = sampler(rows, jax.random.key(0))
    return np.bincount(tokens, minlength=len(logits)) / count


def test_temperature_zero_takes_the_likeliest():
    assert drawn(sampling.Sampler(temperature=0)).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_shares_are_those_of_the_softmax(temperature):
    shares = np.array([0.1, 0.4, 0.2, 0.3]) ** (1 / temperature)
    found = drawn(sampling.Sampler(temperature))
    np.testing.assert_allclose(found, shares / shares.sum(), atol=0.03)


def test_top_k():
    found = drawn(sampling.Sampler(top_k=2))
    np.testing.assert_allclose(found, [0, 4 / 7, 0, 3 / 7], atol=0.03)


@pytest.mark.parametrize(
    ("top_p", "left"),
    [(0.3, [1]), (0.4, [1]), (0.45, [1, 3]), (0.75, [1, 2, 3]), (1.0, [0, 1, 2, 3])],
)
def test_top_p_is_the_smallest_set_that_reaches_it(top_p, left):
    found = drawn(sampling.Sampler(top_p=top_p))
    assert np.flatnonzero(found).tolist() == left


def test_top_k_comes_before_top_p():
    """Of the two that are left, 4/7 and 3/7, the first reaches one half."""
    assert np.flatnonzero(drawn(sampling.Sampler(top_k=2, top_p=0.5))).tolist() == [1]


def test_more_than_there_are():
    assert (drawn(sampling.Sampler(top_k=9)) > 0).all()


@pytest.mark.parametrize(
    "values",
    [{"temperature": -1}, {"top_k": 0}, {"top_p": 0}, {"top_p": 1.5}],
    ids=str,
)
def test_values_out_of_range(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        sampling.Sampler(**values)


def test_one_program_for_all_temperatures_but_zero():
    traced = []

    @jax.jit
    def draw(sampler):
        traced.append(sampler)
        return sampler(LOGITS, jax.random.key(0))

    for temperature in (0.5, 0.7, 0.0, 0):
        draw(sampling.Sampler(temperature, top_p=0.9))
    assert len(traced) == 2
    assert int(draw(sampling.Sampler(0))) == 1
