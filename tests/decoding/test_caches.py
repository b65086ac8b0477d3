"""Attention with a cache is that of the whole sequence, with windows and padding."""

import inspect

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.experimental import checkify

import graftree as nnx
from tests import strategies, tables
from tests.contract.test_nn_layers import test_attention_options
from tests.contract.test_nn_layers.test_attention import attention
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


@pytest.mark.long
@strategies.examples(few=30, many=500)
@hypothesis.given(
    window=st.sampled_from(WINDOWS),
    max_length=st.sampled_from([8, 24]),
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


# Each option of attention with a value. Its arrays may have axes of keys, or of
# queries and keys: those of a step are the rows of its tokens, and all slots.
OPTIONS = {
    "bias": random(2, 1, 24, 24, seed=5),
    # Each token sees itself: the average of no keys would be that of all slots.
    "mask": (np.random.default_rng(6).random((2, 4, 24, 24)) < 0.7)
    | np.eye(24, dtype=bool),
    "broadcast_dropout": False,
    "dropout_rng": jax.random.key(0),
    "dropout_rate": 0.5,
    "deterministic": True,
    "dtype": jnp.float16,
    "precision": "highest",
    "module": test_attention_options.Silent(),
    "promote_dtype": lambda arrays, dtype: tuple(2 * x for x in arrays),
    "is_causal": True,
    "scale": 0.3,
    "sliding_window": 5,
    "logits_soft_cap": 2.0,
    "sinks": random(4, seed=4),
    "key_value_seq_lengths": np.array([24, 9]),
    "implementation": "xla",
}
REQUIRES = {
    "broadcast_dropout": "deterministic dropout_rate dropout_rng",
    "dropout_rate": "deterministic",
}
OF_RINGS = {"sliding_window": 5}


def with_a_cache(name, cache, **options):
    """The results of several tokens, of one, and of several more."""
    results = []
    for at in (slice(9), slice(9, 10), slice(10, 24)):
        positions = np.tile(np.arange(24)[at], (2, 1))
        own = dict(options)
        if name in ("bias", "mask"):
            own[name] = own[name][..., at, :]
        arrays = [x[:, at] for x in SEQUENCES]
        results.append(nnx.decoding.attend(*arrays, positions, cache, **own))
    return jnp.concatenate(results, axis=1)


def test_every_option_of_attention_has_a_test_with_a_cache():
    names = inspect.signature(nnx.dot_product_attention).parameters
    assert {*names} == {"query", "key", "value", *OPTIONS}


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_means_the_same_with_a_cache(name, ring):
    options = {key: OPTIONS[key] for key in (name, *REQUIRES.get(name, "").split())}
    if ring:
        options |= OF_RINGS
    cache = new_cache(window=options.get("sliding_window"))
    if ring and name in ("bias", "mask"):
        with pytest.raises(
            ValueError, match=f"the {name} doesn't fit a cache with a ring"
        ):
            with_a_cache(name, cache, **options)
        return
    expected = nnx.decoding.attend(*SEQUENCES, **options)
    y = with_a_cache(name, cache, **options)
    assert y.dtype == expected.dtype
    half = y.dtype == jnp.float16
    is_token = (
        np.arange(24) < options.get("key_value_seq_lengths", np.full(2, 24))[:, None]
    )
    np.testing.assert_allclose(
        y[is_token], expected[is_token], *((1e-2, 1e-3) if half else (1e-4, 1e-5))
    )


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
    ({"is_causal": False}, r"is_causal=False.*\n.*nnx.dot_product_attention"),
)
def test_attend_refuses_what_does_not_fit_a_cache(more, message):
    arrays, positions = chunk_of([0, 0], [1, 1], 1, "right")
    given = {"positions": positions, "cache": new_cache()}
    with pytest.raises(ValueError, match=message):
        nnx.decoding.attend(*arrays, **given | more)


def test_a_window_is_at_least_one_token():
    with pytest.raises(ValueError, match="window >= 1, got 0"):
        new_cache(window=0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("window", [None, 5])
def test_the_dtype_of_a_cache_is_not_that_of_the_result(window, dtype):
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in SEQUENCES]
    expected = nnx.decoding.attend(*arrays, sliding_window=window)
    cache = new_cache(window=window, dtype=dtype)
    positions = np.tile(np.arange(24), (2, 1))
    report = nnx.precision.report(
        lambda *args: nnx.decoding.attend(*args, sliding_window=window),
        *(*arrays, positions, cache),
    )
    assert {x.operands for x in report.operations if x.name == "dot"} == {
        ("bfloat16", "bfloat16")
    }
    y = STEP(*arrays, positions, cache, sliding_window=window)
    assert y.dtype == expected.dtype == jnp.bfloat16
    assert cache.key.dtype == dtype
    # Both hold the same numbers, which bfloat16 has.
    np.testing.assert_allclose(*(np.float32(x) for x in (y, expected)), 0.02, 0.02)


@tables.cases(
    "size, positions, message",
    (4, np.arange(5), "4 slots has no room for 5 tokens.\nMake it longer"),
    (8, np.array([7, 8]), "8 slots has no room for a token at position 8"),
    (8, np.array([9]), "8 slots has no room for a token at position 9"),
)
@pytest.mark.parametrize("window", [None, 30])
def test_a_cache_that_is_known_to_be_too_small_is_an_error(
    window, size, positions, message
):
    cache, at = new_cache(size, window), np.tile(positions, (2, 1))
    before = jax.tree.map(np.asarray, nnx.state(cache))
    arrays = [x[:, : len(positions)] for x in SEQUENCES]
    with pytest.raises(ValueError, match=message):
        nnx.decoding.attend(*arrays, at, cache, sliding_window=window)
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(cache))
    if size < len(positions):
        with pytest.raises(ValueError, match=message):
            STEP(*arrays, jnp.asarray(at), cache, sliding_window=window)


def test_a_compiled_step_can_check_its_positions():
    @nnx.jit
    @nnx.checkify
    def step(arrays, positions, cache):
        checkify.check(positions.max() < 8, "no slot at {last}", last=positions.max())
        return nnx.decoding.attend(*arrays, positions, cache)

    arrays = [x[:, :1] for x in SEQUENCES]
    for position, message in ((7, None), (8, "no slot at 8")):
        error, _ = step(arrays, jnp.full((2, 1), position), new_cache(8))
        assert (error.get() or "").startswith(message or "")
        assert (error.get() is None) == (message is None)


@tables.cases(
    "more",
    ({"key_value_seq_lengths": [1]}),
    ({"mask": np.ones((3, 1, 1, 24))}),
    ({"sinks": np.ones(3)}),
    ({"no_such_option": 1}),
)
def test_a_call_that_fails_leaves_the_cache_as_it_was(more):
    arrays, positions = chunk_of([0, 0], [3, 3], 3, "right")
    cache = new_cache()
    with pytest.raises((TypeError, ValueError)):
        nnx.decoding.attend(*arrays, positions, cache, **more)
    assert not cache.key[...].any() and not cache.value[...].any()


def test_a_mask_may_lack_axes():
    options = {"mask": OPTIONS["mask"][0, 0], "bias": OPTIONS["bias"][0, 0, :1]}
    expected = attention(*SEQUENCES, is_causal=True, **options)
    positions = np.tile(np.arange(24), (2, 1))
    y = STEP(*SEQUENCES, positions, new_cache(), **options)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["mask", "bias"])
def test_a_mask_over_the_tokens_of_a_call_does_not_fit_a_cache(name):
    arrays, positions = chunk_of([0, 0], [3, 3], 3, "right")
    more = {name: jnp.ones((3, 3), jnp.float32)}
    message = (
        rf"the {name} doesn't fit a cache with 24 slots.*\n  {name} float32\[3,3\]"
    )
    with pytest.raises(ValueError, match=message):
        nnx.decoding.attend(*arrays, positions, new_cache(), **more)
