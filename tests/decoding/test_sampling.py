"""Samplers and processors of logits are their formulas in NumPy, in float64."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import graftree as nnx
from tests import strategies, tables

Sampler = nnx.decoding.Sampler


def kept(logits, temperature, top_k=None, top_p=1.0, min_p=0.0):
    """The tokens left to choose from, by the words of the docstring, in float64."""
    logits = np.asarray(logits, np.float64)
    order = np.argsort(-logits, kind="stable")[:top_k]
    weights = np.exp((logits[order] - logits.max()) / temperature)
    reached = np.cumsum(weights / weights.sum()) >= top_p - 1e-9
    count = np.argmax(reached) + 1 if reached.any() else len(order)
    return {*order[:count][weights[:count] >= min_p - 1e-9].tolist()}


def shares_of(sampler, logits, count):
    """How often each token is drawn."""
    rows = np.broadcast_to(np.asarray(logits, np.float32), (count, len(logits)))
    return np.bincount(sampler(rows, jax.random.key(0)), minlength=len(logits)) / count


def drawn(sampler, logits, count=400):
    return {*np.flatnonzero(shares_of(sampler, logits, count)).tolist()}


SHARES = np.array([0.1, 0.4, 0.2, 0.3])


@tables.cases(
    "options, weights",
    ({}, SHARES),
    ({"temperature": 0.5}, SHARES**2),
    ({"temperature": 2.0}, SHARES**0.5),
    ({"temperature": 0}, [0, 1, 0, 0]),
    ({"top_k": 2}, [0, 4, 0, 3]),
    # The smallest set that reaches it.
    ({"top_p": 0.4}, [0, 1, 0, 0]),
    ({"top_p": 0.45}, [0, 4, 0, 3]),
    ({"top_p": 0.75}, [0, 4, 2, 3]),
    # Of the two that are left, 4/7 and 3/7, the first reaches one half.
    ({"top_k": 2, "top_p": 0.5}, [0, 1, 0, 0]),
    # At least a fraction of 0.4; equal to it is enough.
    ({"min_p": 0.25}, SHARES),
    ({"min_p": 0.3}, [0, 4, 2, 3]),
    ({"min_p": 0.75}, [0, 4, 0, 3]),
    ({"min_p": 0.3, "top_k": 2}, [0, 4, 0, 3]),
    # Of all probability 0.75 takes three; of what min-p leaves it would take two.
    ({"min_p": 0.3, "top_p": 0.75}, [0, 4, 2, 3]),
    ({"min_p": 0.6, "top_p": 0.75}, [0, 4, 0, 3]),
    # The temperature comes first: 0.01, 0.16, 0.04, 0.09.
    ({"min_p": 0.3, "temperature": 0.5}, [0, 16, 0, 9]),
    ids=str,
)
def test_shares_are_those_of_the_softmax_of_what_is_left(options, weights):
    found = shares_of(Sampler(**options), np.log(SHARES), 4000)
    np.testing.assert_allclose(found, weights / np.sum(weights), atol=0.03)
    np.testing.assert_array_equal(found > 0, np.asarray(weights) > 0)


@tables.cases(
    "values",
    {"temperature": -1},
    {"top_k": 0},
    {"top_p": 0},
    {"top_p": 1.5},
    {"min_p": 1.1},
    {"temperature": np.float32(-1)},
    ids=str,
)
def test_values_out_of_range_are_refused(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        Sampler(**values)


def test_one_program_for_all_temperatures_but_zero():
    traced = []

    @jax.jit
    def draw(sampler):
        traced.append(sampler)
        return sampler(jnp.log(SHARES), jax.random.key(0))

    for temperature in (0.5, 0.7, 0.0, 0):
        draw(Sampler(temperature, top_p=0.9, min_p=temperature / 9))
    assert len(traced) == 2 and int(draw(Sampler(0))) == 1


def rows(n):
    return st.lists(st.sampled_from(np.arange(-3, 4) / 2), min_size=n, max_size=n)


@strategies.examples(few=25, many=1000)
@hypothesis.given(
    # Each number of tokens is a program.
    logits=st.sampled_from([1, 3, 12]).flatmap(rows),
    temperature=st.sampled_from([0.5, 1.0, 3.0]),
    top_k=st.sampled_from([None, 1, 2, 5, 14]),
    # None of these is within rounding of a sum of shares that are equal.
    top_p=st.sampled_from([1e-50, 1e-6, 0.0999, 0.35, 0.501, 0.77, 0.913, 1.0]),
    # None is within rounding of a quotient of two shares, but 1.
    min_p=st.sampled_from([0.0, 0.003, 0.2, 0.7, 1.0]),
)
def test_no_token_outside_of_the_set_is_drawn(logits, temperature, top_k, top_p, min_p):
    sampler = Sampler(temperature, top_k, top_p, min_p)
    allowed = kept(logits, temperature, top_k, top_p, min_p)
    found = drawn(sampler, logits)
    assert found <= allowed
    if len({*np.asarray(logits)[[*allowed]]}) == 1:  # each with at least 1/12
        assert found == allowed


@tables.cases(
    "options, left",
    ({"top_k": 1}, 1),
    ({"top_k": 7}, 7),
    ({"top_p": 0.1}, 10),
    ({"top_p": 0.5}, 50),
    ids=str,
)
def test_of_equal_logits_the_first_are_left(options, left):
    sampler = Sampler(**options)
    assert drawn(sampler, np.zeros(100), 4000) == {*range(left)}
    assert drawn(sampler, np.array([0.0, -0.0] * 50), 4000) == {*range(left)}


@tables.cases(
    "options",
    *({"temperature": x} for x in (1e-10, 1e-37, 1e-40, 1e-300)),
    *({"top_p": x} for x in (1e-7, 1e-38, 1e-50)),
    {"temperature": 1e-37, "top_k": 3, "top_p": 1e-50},
    ids=str,
)
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e-4])
def test_extremes_give_the_likeliest_token(options, scale):
    logits = np.array([-3.0, 1.0, -2.0, 5.0, 4.0]) * scale
    sampler = Sampler(**options)
    assert drawn(sampler, logits) == {3}
    drawn_once = jax.jit(sampler)(jnp.asarray(logits)[None], jax.random.key(0))
    assert drawn_once.tolist() == [3]


def test_what_is_masked_is_never_drawn():
    logits = np.array([-np.inf, 1.0, -np.inf, 1.0])
    masks = {}, {"top_k": 4}, {"top_p": 1.0}, {"min_p": 0.0}, {"temperature": 1e-37}
    for options in masks:
        assert drawn(Sampler(**options), logits) == {1, 3}


def test_wide_logits_stay_wide():
    with jax.enable_x64(True):
        logits = jnp.array([1.0, 1.0 + 1e-12])
        key = jax.random.key(0)
        assert int(Sampler(0)(logits, key)) == int(Sampler(1e-16)(logits, key)) == 1


# --------------------------------------------------------------------------- processors


def history_of(rows, prompt_lengths, size=12):
    tokens = np.zeros((len(rows), size), np.int32)
    for row, padded in zip(rows, tokens, strict=True):
        padded[: len(row)] = row
    lengths = np.array([len(row) for row in rows])
    return nnx.decoding.History(jnp.asarray(tokens), lengths, np.array(prompt_lengths))


def penalized(logits, row, penalty):
    """As RepetitionPenaltyLogitsProcessor of transformers, in float64."""
    found = np.array(logits, np.float64)
    for token in {*row}:
        found[token] *= penalty if found[token] < 0 else 1 / penalty
    return found


@strategies.examples(few=25, many=500)
@hypothesis.given(
    st.lists(
        st.lists(st.integers(0, 6), min_size=1, max_size=12), min_size=2, max_size=2
    ),
    st.integers(0, 99),
    st.sampled_from([0.5, 1.0, 1.2, 30.0]),
)
def test_repetitions_are_penalized_once_each(rows, seed, penalty):
    logits = np.random.default_rng(seed).normal(size=(2, 7)).astype(np.float32)
    logits[:, seed % 7] = 0
    history = history_of(rows, [1, 1])
    found = nnx.decoding.RepetitionPenalty(penalty)(jnp.asarray(logits), history)
    expected = [penalized(*pair, penalty) for pair in zip(logits, rows, strict=True)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    counts = [np.bincount(row, minlength=7) for row in rows]
    np.testing.assert_array_equal(history.counts(7), counts)
    assert history.last.tolist() == [row[-1] for row in rows]


@pytest.mark.parametrize("penalty", [0, -1.0, float("inf"), float("nan")])
def test_a_penalty_is_positive(penalty):
    with pytest.raises(ValueError, match="above 0 and finite"):
        nnx.decoding.RepetitionPenalty(penalty)
