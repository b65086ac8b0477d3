"""Generation equals a loop without a cache."""

import dataclasses
from typing import ClassVar

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import graftree as nnx
from examples.models import gpt2, llama
from tests import strategies, tables, tiny_llamas
from tests.decoding import models
from tests.decoding.conftest import joined

generate, stream = nnx.decoding.generate, nnx.decoding.stream
LOGITS = nnx.jit(lambda model, tokens: model(tokens))


def continued(model, prompt, count, change=lambda logits, row: logits):
    """The likeliest tokens, each by a call for the whole sequence."""
    tokens = np.zeros((1, 16), int)
    tokens[0, : len(prompt)] = prompt
    for at in range(len(prompt), len(prompt) + count):
        logits = np.asarray(LOGITS(model, tokens)[0, at - 1], np.float64)
        tokens[0, at] = change(logits, tokens[0, :at]).argmax()
    return tokens[0, len(prompt) : len(prompt) + count].tolist()


PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6]]


def test_the_cache_changes_nothing(model):
    tokens = jnp.array([[3, 1, 4, 1, 5, 9]])
    cache = model.init_cache(1, 8)
    step = nnx.jit(lambda m, tokens, at, cache: m(tokens, positions=at, cache=cache))
    parts = []
    for start, stop in [(0, 3), (3, 4), (4, 5), (5, 6)]:
        positions = jnp.arange(start, stop)[None]
        parts.append(step(model, tokens[:, start:stop], positions, cache))
    expected = LOGITS(model, tokens)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), expected, atol=1e-5)


def test_prompts_of_different_lengths(model):
    made = generate(model, PROMPTS, max_new_tokens=5)
    assert made.lists() == [continued(model, prompt, 5) for prompt in PROMPTS]


class SlotsOfItsOwn(nnx.Module):
    def __init__(self, batch, length):
        self.key, self.value = (nnx.Cache(jnp.zeros((batch, length, 8))) for _ in "kv")


class WritesItsOwnCache(nnx.Module):
    """A model as people write it: two layers, a cache by index, a mask of -inf."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(20, 8, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(8, 24, rngs=rngs) for _ in range(2)])
        self.out = nnx.Linear(8, 20, rngs=rngs)

    def init_cache(self, batch, length):
        return [SlotsOfItsOwn(batch, length) for _ in self.layers]

    def seen(self, key, value, positions, cache):
        rows = jnp.arange(len(positions))[:, None]
        for held, new in ((cache.key, key), (cache.value, value)):
            held[...] = held[...].at[rows, positions].set(new)
        slots = jnp.arange(cache.key.shape[1])[None, None]
        return cache.key[...], cache.value[...], positions[:, :, None] >= slots

    def __call__(self, tokens, *, positions, cache):
        x = self.embed(tokens)
        for layer, held in zip(self.layers, cache, strict=True):
            query, key, value = jnp.split(layer(x), 3, axis=-1)
            key, value, mask = self.seen(key, value, positions, held)
            weights = jnp.einsum("bqd,bkd->bqk", query, key)
            x += jax.nn.softmax(jnp.where(mask, weights, -jnp.inf)) @ value
        return self.out(x)


class WithAWindow(WritesItsOwnCache):
    def init_cache(self, batch, length):
        sizes = {"kv_heads": 1, "head_dim": 8, "window": 4}
        make = nnx.decoding.KeyValueCache
        return [make(batch, length, **sizes) for _ in self.layers]

    def seen(self, key, value, positions, cache):
        key, value = key[:, :, None], value[:, :, None]
        key, value, mask = cache.extend(key, value, positions)
        return key[:, :, 0], value[:, :, 0], mask[:, 0]


@pytest.mark.parametrize("kind", [WritesItsOwnCache, WithAWindow])
def test_padding_reaches_no_token_where_all_that_is_masked_is_infinite(kind):
    model = kind(nnx.Rngs(0))
    first, second = generate(model, PROMPTS[:2], max_new_tokens=6).lists()
    alone = generate(model, PROMPTS[1:2], max_new_tokens=6, padded_length=1)
    assert alone.lists() == [second] != [first]


SIZES = {"vocab_size": 40, "n_positions": 48, "n_embd": 8, "n_layer": 1, "n_head": 2}
GPT2 = gpt2.Config(**SIZES, layer_norm_epsilon=1e-5)


# For sequences of 48 tokens, with a table of positions and without.
FAMILIES = {
    "gpt2": lambda: gpt2.GPT2(GPT2, rngs=nnx.Rngs(1)),
    "llama": lambda: llama.Llama(tiny_llamas.CONFIG, rngs=nnx.Rngs(2)),
}


def padded(rows, pad, side):
    tokens = np.full((len(rows), max(map(len, rows))), pad)
    for row, prompt in zip(tokens, rows, strict=True):
        row[len(row) - len(prompt) if side == "left" else 0 :][: len(prompt)] = prompt
    return tokens


PROMPT = st.lists(st.integers(0, 38), min_size=1, max_size=32)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_is_continued_as_if_it_were_the_only_one(name):
    model = FAMILIES[name]()
    options = {"max_new_tokens": 6, "padded_length": 32}

    @strategies.examples(few=6, many=60)
    @hypothesis.given(PROMPT, st.lists(st.integers(0, 38), min_size=30, max_size=32))
    @hypothesis.example([5], [*range(32)])
    def check(first, second):
        rows = [first, second, [7]]
        made = generate(model, rows, **options).lists()
        for side in ("left", "right"):
            given = padded(rows, 39, side)
            assert generate(model, given, pad=39, **options).lists() == made
        for row, tokens in zip(rows, made, strict=True):
            (alone,) = generate(model, [row], **options).lists()
            assert alone == tokens or is_close_call(model, row, alone, tokens)

    check()


SHORT = {"original_max_position_embeddings": 4, "max_position_embeddings": 64}
FACTORS = {"short_factor": [1.0, 1.0], "long_factor": [1.0, 7.0]}
SCALINGS = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, **SHORT},
    "dynamic": models.DYNAMIC,
    "longrope": {"rope_type": "longrope", **FACTORS, **SHORT},
}


@tables.cases(
    "name, window",
    ("yarn", None),
    ("dynamic", None),
    ("longrope", None),
    ("longrope", 5),
)
def test_padding_does_not_count_as_length(name, window):
    rope = nnx.RoPE(2.0, scaling=SCALINGS[name])
    model = models.Attends(rope=rope, scale=1.0, sliding_window=window)
    rows, options = [[3, 1, 4, 1, 5, 9], [2, 7, 5]], {"max_new_tokens": 6}
    made = generate(model, rows, **options).lists()
    for side in ("left", "right"):
        found = generate(model, padded(rows, 89, side), pad=89, **options)
        assert found.lists() == made
    alone = generate(model, rows[1:], padded_length=3, **options)
    assert alone.lists() == made[1:]


def is_close_call(model, prompt, one, two):
    """Whether the first tokens that differ are alike but for rounding."""
    at = next(i for i, (a, b) in enumerate(zip(one, two, strict=True)) if a != b)
    logits = LOGITS(model, jnp.array([prompt + one[:at]]))[0, -1]
    return abs(logits[one[at]] - logits[two[at]]) < 1e-4


@pytest.mark.long
def test_padding_has_no_position_behind_the_last_one():
    """There a table of positions has nothing but NaN, which would reach all tokens."""
    config = dataclasses.replace(GPT2, n_positions=16)
    short = gpt2.GPT2(config, rngs=nnx.Rngs(0))
    config = dataclasses.replace(config, n_positions=12)
    model = gpt2.GPT2(config, rngs=nnx.Rngs(0))
    model.positions.embedding[...] = short.positions.embedding[:12]
    prompt = [7, 3, 1, 4, 1, 5, 9, 2]
    for length in (None, 16):
        made = generate(model, [prompt], max_new_tokens=4, padded_length=length)
        assert made.lists() == [continued(short, prompt, 4)]


def test_no_cache_is_longer_than_the_sequences_of_the_model():
    class Limited(nnx.Module):
        max_length = 20

        def init_cache(self, batch, max_length):
            lengths.append(max_length)
            return {}

        def __call__(self, tokens, *, positions, cache):
            return jax.nn.one_hot(tokens + 1, 30)

    lengths = list[int]()
    made = generate(Limited(), [[*range(10)]], max_new_tokens=9)
    assert (made.lists(), {*lengths}) == ([[*range(10, 19)]], {20})


class Script(nnx.Module):
    """Says the tokens of a table, whatever the prompts are."""

    def __init__(self, table):
        self.table = nnx.Variable(jnp.asarray(table))

    def init_cache(self, batch, max_length):
        return {}

    def __call__(self, tokens, *, positions, cache):
        place = jnp.clip(positions, 0, self.table.shape[1] - 1)
        following = jnp.take_along_axis(self.table[...], place, axis=1)
        return jax.nn.one_hot(following, 10)


def until_stop(row, stop):
    """The row up to the first stop, and the length of the longest that ends there."""
    for length in range(1, len(row) + 1):
        ends = [len(x) for x in stop if row[max(length - len(x), 0) : length] == x]
        if ends:
            return row[:length], max(ends)
    return row, 0


TOKENS = st.integers(0, 2)


@strategies.examples(few=4, many=150)
@hypothesis.given(
    st.lists(st.lists(TOKENS, min_size=8, max_size=8), min_size=2, max_size=2),
    st.lists(st.lists(TOKENS, min_size=1, max_size=4), max_size=3),
    st.sampled_from([1, 3, 8, 20]),
)
@hypothesis.example([[1] * 8, [2] * 8], [[1, 1, 1], [0, 2], [2, 2]], 1)
def test_sequences_end_with_the_first_stop(table, stop, chunk):
    # The prompts look like the beginning of a stop, and are no part of it.
    options = {"max_new_tokens": 8, "padded_length": 1, "stop": stop}
    made = generate(Script(table), [[1], [2]], **options)
    expected = [until_stop(row, stop) for row in table]
    assert made.lists() == [row for row, _ in expected]
    assert made.lengths.tolist() == [len(row) for row, _ in expected]
    assert made.stop_lengths.tolist() == [length for _, length in expected]
    texts = [row[: len(row) - length] for row, length in expected]
    assert made.lists(with_stop=False) == texts
    rows = zip(made.tokens, made.lengths, strict=True)
    assert all(not row[n:].any() for row, n in rows)
    parts = [*stream(Script(table), [[1], [2]], chunk=chunk, **options)]
    assert joined(parts) == made.lists()
    np.testing.assert_array_equal(sum(p.lengths for p in parts), made.lengths)
    np.testing.assert_array_equal(sum(p.stop_lengths for p in parts), made.stop_lengths)
    assert len(parts) == -(-made.lengths.max() // chunk)


def test_tokens_and_sequences_may_be_stops(model):
    whole = [continued(model, prompt, 5) for prompt in PROMPTS]
    stop = [whole[0][2], tuple(whole[1][:2]), np.array(whole[2][2:4])]
    lists = [[stop[0]], whole[1][:2], whole[2][2:4]]
    made = generate(model, PROMPTS, max_new_tokens=5, stop=stop)
    assert made.lists() == [until_stop(row, lists)[0] for row in whole]


@pytest.mark.parametrize("stop", [2, "###", ["###"], [[]], [[[1]]], [1.5], None])
def test_stops_are_tokens(model, stop):
    with pytest.raises(TypeError, match=r"stop must.*as in.*stop=\[2, \[13, 13\]\]"):
        generate(model, PROMPTS, max_new_tokens=5, stop=stop)


def test_one_program_for_all_prompts_of_a_padded_length(watched):
    model, traced = watched
    for length in (2, 9, 16):
        generate(model, [[1] * length], max_new_tokens=2)
    assert traced == [(1, 16), (1, 1)]
    generate(model, [[1] * 17], max_new_tokens=2)
    assert traced[2:] == [(1, 32), (1, 1)]


def test_samples_depend_on_the_key_only(model):
    options = {"max_new_tokens": 8, "sampler": nnx.decoding.Sampler(1.5)}

    def sample(key):
        return generate(model, PROMPTS, key=jax.random.key(key), **options).tokens

    np.testing.assert_array_equal(sample(0), sample(0))
    assert (sample(0) != sample(1)).any()


@tables.cases(
    "prompts, more, error",
    ([[]], {}, "at least one token"),
    ([], {}, "at least one token"),
    ([[1] * 40], {}, "would have 49 tokens, but the model takes 48"),
    ([[1]], {"padded_length": 0}, "longest prompt"),
    ([[1]], {"sampler": nnx.decoding.Sampler()}, "needs key="),
    ([[1]], {"max_new_tokens": 0}, "at least 1"),
    ([[1]], {"stop": [[1, -2]]}, "must be from 0 to"),
    ids=["empty", "none", "too long", "padding", "no key", "no tokens", "stop"],
)
def test_what_can_not_be_continued(model, prompts, more, error):
    with pytest.raises(ValueError, match=error):
        generate(model, prompts, **{"max_new_tokens": 9, **more})


def test_numbers_of_tokens_are_whole(model):
    for name in ("max_new_tokens", "padded_length"):
        with pytest.raises(TypeError, match=f"{name} must be a whole number, got 3.0"):
            generate(model, [[1]], **{"max_new_tokens": 2, name: 3.0})
    made = generate(model, [[1]], max_new_tokens=np.int64(2))
    assert made.lists() == generate(model, [[1]], max_new_tokens=2).lists()


def test_prompts_are_integers(model):
    for prompts in ([[1.5]], None, [[[1]]]):
        with pytest.raises(TypeError, match="prompts of integers"):
            generate(model, prompts, max_new_tokens=1)
    for prompts in ("text", ["text"]):
        with pytest.raises(TypeError, match="prompts of integers.*\n.*tokenizer"):
            generate(model, prompts, max_new_tokens=1)


def test_a_cache_takes_what_fits():
    cache = nnx.decoding.KeyValueCache(2, 4, kv_heads=1, head_dim=3)
    x = jnp.ones((2, 1, 1, 3))
    with pytest.raises(ValueError, match="can't take"):
        cache.extend(x[:1], x[:1], jnp.zeros((1, 1), int))
    with pytest.raises(ValueError, match="needs a position"):
        cache.extend(x, x, jnp.zeros((2, 2), int))
    extend = nnx.jit(nnx.decoding.KeyValueCache.extend)
    key, _, mask = extend(cache, x, x, jnp.array([[0], [9]]))
    assert not key[1].any()  # behind the last slot: not kept
    assert mask[0, 0, 0].tolist() == [True, False, False, False]


def count(model, x):
    model.calls[...] += 1


def drop(model, x):
    return model.dropout(x)


def normalize(model, x):
    model.norm(x)


@pytest.mark.parametrize("act", [count, drop, normalize])
def test_a_model_may_write_to_its_variables_as_in_a_loop_of_python(act):
    model, other = models.Writer(act), models.Writer(act)
    made = generate(model, [[1, 2]], max_new_tokens=3, padded_length=2)
    tokens, cache = [1, 2], other.init_cache(1, 5)
    logits = other(jnp.array([tokens]), positions=None, cache=cache)
    for _ in range(2):
        tokens.append(int(logits[0, -1].argmax()))
        logits = other(jnp.array([tokens[-1:]]), positions=None, cache=cache)
    tokens.append(int(logits[0, -1].argmax()))
    assert made.lists() == [tokens[2:]]
    expected = jax.tree.leaves(nnx.as_pure(nnx.state(other, nnx.Not(nnx.RngKey))))
    found = jax.tree.leaves(nnx.as_pure(nnx.state(model, nnx.Not(nnx.RngKey))))
    for one, two in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-6)


def replace(model, x):
    model.last = nnx.Variable(x)


def sow(model, x):
    model.sow(nnx.Intermediate, "last", x)


def grow(model, x):
    model.calls.set_value(jnp.append(model.calls[...], 1))


@pytest.mark.filterwarnings("ignore:Calling Module.sow")
@tables.cases("call", generate, lambda *args, **options: next(stream(*args, **options)))
@pytest.mark.parametrize("act", [replace, sow, grow])
def test_a_model_that_keeps_more_with_each_call_is_told_where(act, call):
    model = models.Writer(lambda model, x: act(model, model.dropout(x)))
    where = "model.calls: Variable" if act is grow else r"model\.last: \w+"
    with pytest.raises(ValueError, match=f"{where}.* before a call, (?s:.*)__init__"):
        call(model, [[1, 2]], max_new_tokens=3)
    assert not hasattr(model, "last")
    assert model.calls[...] == model.dropout.rngs.count[...] == 0


@pytest.mark.parametrize("token", [-1, -100, 2**31, 2**32 + 3])
def test_what_is_no_token_is_told(model, token):
    with pytest.raises(ValueError, match=f"{token} is not a token.*\n.*pad={token}"):
        generate(model, np.array([[1, token]]), max_new_tokens=1)
    made = generate(model, [[1, token]], max_new_tokens=1, pad=token)
    assert made.lists() == [continued(model, [1], 1)]
    with pytest.raises(ValueError, match="from 0 to"):
        generate(model, [[1]], max_new_tokens=1, stop=[2**32 + 3])


@tables.cases(
    "call",
    generate,
    lambda *args, **options: [*stream(*args, **options)],
    lambda *args, **options: nnx.decoding.beam_search(*args, num_beams=2, **options),
    lambda model, *args, **options: nnx.decoding.speculate(
        model, model, *args, **options
    ),
)
def test_a_token_that_the_model_lacks_is_told(call):
    model = models.Attends()
    told = r"decoding\.\w+.*a token 90,.*Attends are from 0 to 89(?s:.*)pad=90"
    with pytest.raises(ValueError, match=told):
        call(model, [[1, 2], [90]], max_new_tokens=1)
    call(model, [[1, 2], [89]], max_new_tokens=1)

    class Buckets(models.Attends):
        def __call__(self, tokens, **options):
            return jnp.tile(super().__call__(tokens % 90, **options), 2)

    call(Buckets(), [[1, 2], [90]], max_new_tokens=1)


@tables.cases("prompts", 7, [1, 2, 3], np.array([1, 2, 3]), jnp.array([1, 2]))
def test_a_single_prompt_is_told_to_be_a_batch_of_one(model, prompts):
    with pytest.raises(TypeError, match=r"\[\[1, 2, 3\]\]"):
        generate(model, prompts, max_new_tokens=1)


def test_what_is_no_model_is_told_what_one_has(model):
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    for wrong, got in (
        (nnx.Linear, "the class Linear, not"),
        (llama.Llama, "the class Llama, not"),
        (layer, "a Linear without that method"),
        (None, "a NoneType without"),
    ):
        with pytest.raises(TypeError, match=f"init_cache.*got {got}"):
            generate(wrong, [[1]], max_new_tokens=1)


# --------------------------------------------------------------------------- processors


def digest(row):
    """A number that depends on all tokens and their places."""
    return int(sum((place + 3) * token for place, token in enumerate(row)) % 40)


def say_digest(logits, history):
    weights = jnp.arange(history.tokens.shape[1])[None] + 3
    token = jnp.where(history.is_token, history.tokens * weights, 0).sum(1) % 40
    new = history.lengths - history.prompt_lengths
    return 100 * jax.nn.one_hot((token + new) % 40, 40)


def test_a_processor_sees_the_tokens_so_far_of_each_row(model):
    expected = []
    for prompt in PROMPTS:
        row = [*prompt]
        for new in range(6):
            row.append((digest(row) + new) % 40)
        expected.append(row[len(prompt) :])
    options = {"max_new_tokens": 6, "processors": [say_digest]}
    assert generate(model, PROMPTS, **options).lists() == expected
    stop = [expected[0][1]]
    ended = [until_stop(row, [stop])[0] for row in expected]
    assert generate(model, PROMPTS, stop=stop, **options).lists() == ended


def ban(logits, history):
    return logits.at[:, jnp.array([1, 36])].set(-jnp.inf)


@pytest.mark.long
def test_processors_are_applied_in_their_order(model):
    def change(logits, row):
        logits[[1, 36]] = -np.inf
        seen = np.unique(row)
        logits[seen] *= np.where(logits[seen] < 0, 3.0, 1 / 3)
        return logits

    processors = [ban, nnx.decoding.RepetitionPenalty(3.0)]
    made = generate(model, PROMPTS, max_new_tokens=6, processors=processors)
    assert made.lists() == [continued(model, row, 6, change) for row in PROMPTS]
    assert made.lists() != generate(model, PROMPTS, max_new_tokens=6).lists()


class Follows(nnx.Module):
    """Allows for each token those of a table; and counts its calls."""

    traced: ClassVar = []

    def __init__(self, table):
        self.table, self.calls = nnx.Variable(table), nnx.Variable(jnp.array(0))

    def __call__(self, logits, history):
        self.traced.append(logits.shape)
        self.calls[...] += 1
        return jnp.where(self.table[...][history.last], logits, -jnp.inf)


def test_a_processor_may_be_a_module_with_arrays_that_change(model):
    next_one = jnp.eye(40, k=1, dtype=bool)
    follows = Follows(next_one)
    rows = generate(model, PROMPTS, max_new_tokens=4, processors=[follows]).lists()
    assert rows == [[6, 7, 8, 9], [10, 11, 12, 13], [7, 8, 9, 10]]
    follows.table[...] = next_one.T
    rows = generate(model, PROMPTS, max_new_tokens=4, processors=[follows]).lists()
    assert rows == [[4, 3, 2, 1], [8, 7, 6, 5], [5, 4, 3, 2]]
    assert follows.calls[...] == 8 and len(Follows.traced) == 2


def test_one_program_for_all_penalties(model):
    traced = []

    def watch(logits, history):
        traced.append(logits.shape)
        return logits

    for penalty in (1.1, 1.2, 3.0):
        processors = [nnx.decoding.RepetitionPenalty(penalty), watch]
        generate(model, PROMPTS, max_new_tokens=3, processors=processors)
    assert traced == [(3, 40), (3, 40)]


@tables.cases(
    "processors, error",
    (ban, "takes a list of functions"),
    ([3], "takes a list of functions"),
    ([lambda logits, history: None], "float32.3,40.*returned NoneType"),
    ([ban, lambda logits, history: logits > 0], r"processors.1.*returned bool.3,40"),
    ([lambda logits, history: logits[0]], r"returned float32.40"),
    ids=["function", "number", "nothing", "mask", "row"],
)
def test_a_processor_gives_logits(model, processors, error):
    with pytest.raises(TypeError, match=error):
        generate(model, PROMPTS, max_new_tokens=3, processors=processors)
