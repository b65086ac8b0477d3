"""Attention with a cache is that of the whole sequence, with windows and padding."""

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import graftree as nnx
from tests import strategies, tables
from tests.nn.test_attention import attention
from tests.random_arrays import random

WINDOWS = [None, 1, 2, 4, 30]
STEP = nnx.jit(nnx.decoding.attend, static_argnames="sliding_window")
EXTEND = nnx.jit(nnx.decoding.KeyValueCache.extend)
# Two sequences: queries, keys and values of 24 tokens.
SEQUENCES = [
    np.asarray(random(2, 24, heads, 4, seed=heads + i))
    for i, heads in enumerate([4, 2, 2])
]


def new_cache(max_length=24, window=None, batch=2, **options):
    return nnx.decoding.KeyValueCache(
        batch, max_length, kv_heads=2, head_dim=4, window=window, **options
    )


def chunk_of(begun, counts, length, side):
    """The next tokens of each sequence, and their positions, padded on a side."""
    arrays = [np.full((2, length, *x.shape[2:]), 50, x.dtype) for x in SEQUENCES]
    positions = np.full((2, length), -1, np.int32)
    for row, (start, count) in enumerate(zip(begun, counts, strict=True)):
        at = slice(count) if side == "right" else slice(length - count, length)
        positions[row, at] = np.arange(start, start + count)
        for array, sequence in zip(arrays, SEQUENCES, strict=True):
            array[row, at] = sequence[row, start : start + count]
    return arrays, positions


# The length of a chunk, and how many tokens of each row are not padding.
chunks = st.sampled_from([1, 7]).flatmap(
    lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(0, n))
)


@strategies.examples(few=30, many=500)
@hypothesis.given(
    window=st.sampled_from(WINDOWS),
    max_length=st.sampled_from([3, 24]),
    side=st.sampled_from(["left", "right"]),
    chunks=st.lists(chunks, max_size=8),
)
def test_each_token_sees_its_window_however_they_come(window, max_length, side, chunks):
    is_ring = window is not None and window < max_length
    limit = 24 if is_ring else max_length
    cache, begun = new_cache(max_length, window), np.zeros(2, int)
    expected = attention(*SEQUENCES, is_causal=True, sliding_window=window)
    for length, *counts in chunks:
        counts = np.minimum(counts, limit - begun)
        arrays, positions = chunk_of(begun, counts, length, side)
        y = STEP(*arrays, positions, cache, sliding_window=window)
        rows, places = np.nonzero(positions >= 0)
        np.testing.assert_allclose(
            y[rows, places], expected[rows, positions[rows, places]], 1e-4, 1e-5
        )
        assert np.isfinite(y).all()
        begun += counts


@pytest.mark.parametrize("window", WINDOWS)
def test_without_a_cache_a_call_is_the_whole_sequence(window):
    y = STEP(*SEQUENCES, sliding_window=window)
    expected = attention(*SEQUENCES, is_causal=True, sliding_window=window)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_options_reach_attention_with_a_cache_and_without():
    options = {"scale": 0.3, "logits_soft_cap": 2.0, "sinks": random(4, seed=4)}
    expected = attention(*SEQUENCES, is_causal=True, **options)
    positions = np.tile(np.arange(24), (2, 1))
    for more in ({}, {"positions": positions, "cache": new_cache()}):
        y = STEP(*SEQUENCES, **more, **options)
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


@tables.cases("size, window, slots", (24, None, 24), (24, 5, 5), (5, 24, 5), (5, 5, 5))
def test_a_ring_has_no_more_slots_than_a_window(size, window, slots):
    cache = new_cache(size, window, dtype=jnp.bfloat16)
    assert cache.key.shape == cache.value.shape == (2, slots, 2, 4)
    _, key, value = SEQUENCES
    for length in (1, 3):
        positions = np.tile(np.arange(length), (2, 1))
        seen = EXTEND(cache, key[:, :length], value[:, :length], positions)
        assert [x.dtype for x in seen] == [jnp.bfloat16, jnp.bfloat16, bool]


@pytest.mark.parametrize("window", [None, 4])
def test_padding_is_not_kept(window):
    _, key, value = SEQUENCES
    cache = new_cache(6, window)
    EXTEND(cache, key[:, :3], value[:, :3], np.array([[0, 1, 2], [0, -1, -1]]))
    expected = np.zeros(cache.key.shape, np.float32)
    expected[0, :3], expected[1, 0] = key[0, :3], key[1, 0]
    np.testing.assert_array_equal(cache.key, expected)


@tables.cases(
    "more, message",
    ({"sliding_window": 3}, r"sliding_window=3 and a cache with window=None.*\n.*=3\)"),
    ({"positions": None}, "needs positions"),
)
def test_attend_needs_the_window_of_the_cache_and_positions(more, message):
    arrays, positions = chunk_of([0, 0], [1, 1], 1, "right")
    given = {"positions": positions, "cache": new_cache()}
    with pytest.raises(ValueError, match=message):
        nnx.decoding.attend(*arrays, **given | more)


def test_a_window_is_at_least_one_token():
    with pytest.raises(ValueError, match="at least 1: 0"):
        new_cache(window=0)


class Decoder(nnx.Module):
    """Two layers of attention, with and without a window."""

    windows = (3, None)

    def __init__(self, rngs):
        self.embed = nnx.Embed(40, 8, rngs=rngs)
        self.head = nnx.Linear(8, 40, rngs=rngs)
        make = lambda: nnx.LinearGeneral(8, (3, 2, 4), rngs=rngs)  # noqa: E731
        self.project = nnx.List([make(), make()])
        self.rope = nnx.RoPE()

    def init_cache(self, batch, max_length):
        return [new_cache(max_length, window, batch=batch) for window in self.windows]

    def __call__(self, tokens, *, positions=None, cache=(None, None)):
        x = self.embed(tokens)
        for project, size, held in zip(self.project, self.windows, cache, strict=True):
            q, k, v = jnp.moveaxis(project(x), -3, 0)
            q, k = (self.rope.rotate_heads(y, positions) for y in (q, k))
            y = nnx.decoding.attend(q, k, v, positions, held, sliding_window=size)
            x = x + y.reshape(x.shape)
        return self.head(x)


def test_prompts_of_different_lengths_are_continued_with_a_window():
    model, prompts = Decoder(nnx.Rngs(0)), [[3, 1, 4, 1, 5, 9, 2, 6], [9], [2, 6]]
    logits_of = nnx.jit(lambda model, tokens: model(tokens))
    made = nnx.decoding.generate(model, prompts, max_new_tokens=7)
    for prompt, found in zip(prompts, made.lists(), strict=True):
        tokens = np.zeros((1, 16), int)
        tokens[0, : len(prompt)] = prompt
        for at in range(len(prompt), len(prompt) + 7):
            tokens[0, at] = logits_of(model, tokens)[0, at - 1].argmax()
        assert found == tokens[0, len(prompt) :][:7].tolist()
    model.windows = (None, None)
    unlike = nnx.decoding.generate(model, prompts, max_new_tokens=7)
    assert made.lists()[0] != unlike.lists()[0]
