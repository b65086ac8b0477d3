"""Generation equals a loop without a cache, samplers their definition in NumPy."""

import dataclasses

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import graftree as nnx
from examples.models import gpt2, llama
from graftree.decoding import generation
from tests import strategies, tables
from tests.tiny_llamas import CONFIG

generate = nnx.decoding.generate
LOGITS = nnx.jit(lambda model, tokens: model(tokens))


@pytest.fixture(scope="module")
def model():
    return llama.Llama(CONFIG, rngs=nnx.Rngs(3))


def continued(model, prompt, count):
    """The likeliest tokens, each by a call for the whole sequence."""
    tokens = np.zeros((1, 16), int)
    tokens[0, : len(prompt)] = prompt
    for at in range(len(prompt), len(prompt) + count):
        tokens[0, at] = LOGITS(model, tokens)[0, at - 1].argmax()
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


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side(model, side):
    rows = np.full((3, 6), 39)
    for row, prompt in zip(rows, PROMPTS, strict=True):
        at = slice(-len(prompt), None) if side == "left" else slice(len(prompt))
        row[at] = prompt
    made = generate(model, rows, max_new_tokens=5, pad=39)
    expected = generate(model, PROMPTS, max_new_tokens=5)
    assert made.lists() == expected.lists()


def test_padding_has_no_position_behind_the_last_one():
    """There a table of positions has nothing but NaN, which would reach all tokens."""
    config = gpt2.Config(
        vocab_size=40,
        n_positions=16,
        n_embd=8,
        n_layer=1,
        n_head=2,
        layer_norm_epsilon=1e-5,
    )
    short = gpt2.GPT2(config, rngs=nnx.Rngs(0))
    config = dataclasses.replace(config, n_positions=12)
    model = gpt2.GPT2(config, rngs=nnx.Rngs(0))
    model.positions.embedding[...] = short.positions.embedding[:12]
    prompt = [7, 3, 1, 4, 1, 5, 9, 2]
    for length in (None, 16):
        made = generate(model, [prompt], max_new_tokens=4, padded_length=length)
        assert made.lists() == [continued(short, prompt, 4)]


def test_sequences_end_with_a_stop_token(model):
    whole = [continued(model, prompt, 5) for prompt in PROMPTS]
    stop = {whole[0][2], whole[1][0]}
    ended = [
        row[: min((i + 1 for i, token in enumerate(row) if token in stop), default=5)]
        for row in whole
    ]
    made = generate(model, PROMPTS, max_new_tokens=5, stop=[*stop])
    assert made.lists() == ended
    rows = zip(made.tokens, made.lengths, strict=True)
    assert all(not row[n:].any() for row, n in rows)


def test_one_program_for_all_prompts_of_a_padded_length():
    traced = []

    class Watched(llama.Llama):
        def __call__(self, *args, **kwargs):
            traced.append(args[0].shape)
            return super().__call__(*args, **kwargs)

    model = Watched(CONFIG, rngs=nnx.Rngs(0))
    for length in (2, 9, 16):
        generate(model, [[1] * length], max_new_tokens=2)
    assert traced == [(1, 16), (1, 1)]
    generate(model, [[1] * 17], max_new_tokens=2)
    assert traced[2:] == [(1, 32), (1, 1)]


def test_samples_depend_on_the_key_only(model):
    def sample(key):
        return generate(
            model,
            PROMPTS,
            max_new_tokens=8,
            sampler=nnx.decoding.Sampler(1.5),
            key=jax.random.key(key),
        ).tokens

    np.testing.assert_array_equal(sample(0), sample(0))
    assert (sample(0) != sample(1)).any()


@tables.cases(
    "prompts, more, error",
    ([[]], {}, "at least one token"),
    ([], {}, "at least one token"),
    ([[1] * 40], {}, "would get 49 tokens, and the model takes 48"),
    ([[1]], {"padded_length": 0}, "longest prompt"),
    ([[1]], {"sampler": nnx.decoding.Sampler()}, "needs key="),
    ([[1]], {"max_new_tokens": 0}, "at least 1"),
    ids=["empty", "none", "too long", "padding", "no key", "no tokens"],
)
def test_what_can_not_be_continued(model, prompts, more, error):
    with pytest.raises(ValueError, match=error):
        generate(model, prompts, **{"max_new_tokens": 9, **more})


def test_prompts_are_integers(model):
    for prompts in ([[1.5]], "text", [[[1]]]):
        with pytest.raises(TypeError, match="prompts of integers"):
            generate(model, prompts, max_new_tokens=1)


def test_a_cache_takes_what_fits():
    cache = nnx.decoding.KeyValueCache(2, 4, kv_heads=1, head_dim=3)
    x = jnp.ones((2, 1, 1, 3))
    with pytest.raises(ValueError, match="can't take"):
        cache.extend(x[:1], x[:1], jnp.zeros((1, 1), int))
    with pytest.raises(ValueError, match="needs a position"):
        cache.extend(x, x, jnp.zeros((2, 2), int))
    key, _, mask = cache.extend(x, x, jnp.array([[0], [9]]))
    assert not key[1].any()  # behind the last slot: not kept
    assert mask[0, 0, 0].tolist() == [True, False, False, False]


class Writer(nnx.Module):
    """The next token is one more; what else it does is told by a function."""

    def __init__(self, act):
        self.act = act
        self.calls = nnx.Variable(jnp.array(0))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(10, rngs=nnx.Rngs(0))

    def init_cache(self, batch, max_length):
        return {"seen": nnx.Variable(jnp.zeros(batch, int))}

    def __call__(self, tokens, *, positions, cache):
        cache["seen"][...] += tokens.shape[1]
        logits = 9 * jax.nn.one_hot(tokens + 1, 10)
        made = self.act(self, logits)
        return logits if made is None else made


def count(model, x):
    model.calls[...] += 1


def drop(model, x):
    return model.dropout(x)


def normalize(model, x):
    model.norm(x)


@pytest.mark.parametrize("act", [count, drop, normalize])
def test_a_model_may_write_to_its_variables_as_in_a_loop_of_python(act):
    model, other = Writer(act), Writer(act)
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
@pytest.mark.parametrize("act", [replace, sow, grow])
def test_a_model_that_keeps_more_with_each_call_is_told_where(act):
    model = Writer(act)
    where = "model.calls: Variable" if act is grow else r"model\.last: \w+"
    with pytest.raises(ValueError, match=where) as caught:
        generate(model, [[1, 2]], max_new_tokens=3)
    assert "before a call" in str(caught.value) and "__init__" in str(caught.value)
    assert not hasattr(model, "last") and model.calls[...] == 0


@pytest.mark.parametrize("token", [-1, -100, 2**31, 2**32 + 3])
def test_what_is_no_token_is_told(model, token):
    with pytest.raises(ValueError, match=f"{token} is no token.*\n.*pad={token}"):
        generate(model, np.array([[1, token]]), max_new_tokens=1)
    made = generate(model, [[1, token]], max_new_tokens=1, pad=token)
    assert made.lists() == [continued(model, [1], 1)]
    with pytest.raises(ValueError, match="at most"):
        generate(model, [[1]], max_new_tokens=1, stop=[2**32 + 3])


@pytest.mark.parametrize("prompts", [[1, 2, 3], np.array([1, 2, 3]), jnp.array([1, 2])])
def test_a_single_prompt_is_told_to_be_a_batch_of_one(model, prompts):
    with pytest.raises(TypeError, match=r"\[\[1, 2, 3\]\]"):
        generate(model, prompts, max_new_tokens=1)


def test_what_is_no_model_is_told_what_one_has(model):
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    for wrong, got in (
        (nnx.Linear, "the class Linear, and not"),
        (llama.Llama, "the class Llama, and not"),
        (layer, "a Linear without that method"),
        (None, "a NoneType without"),
    ):
        with pytest.raises(TypeError, match=f"init_cache.*got {got}"):
            generate(wrong, [[1]], max_new_tokens=1)


# ----------------------------------------------------------------------------- samplers


Sampler = nnx.decoding.Sampler


def kept(logits, temperature, top_k, top_p):
    """The tokens left to choose from, by the words of the docstring, in float64."""
    logits = np.asarray(logits, np.float64)
    order = np.argsort(-logits, kind="stable")[:top_k]
    weights = np.exp((logits[order] - logits.max()) / temperature)
    shares = weights / weights.sum()
    for count in range(1, len(order) + 1):
        if shares[:count].sum() >= top_p - 1e-9:
            return set(order[:count].tolist())
    return set(order.tolist())


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
    ({"top_k": 9}, SHARES),
    # The smallest set that reaches it.
    ({"top_p": 0.3}, [0, 1, 0, 0]),
    ({"top_p": 0.4}, [0, 1, 0, 0]),
    ({"top_p": 0.45}, [0, 4, 0, 3]),
    ({"top_p": 0.75}, [0, 4, 2, 3]),
    ({"top_p": 1.0}, SHARES),
    # Of the two that are left, 4/7 and 3/7, the first reaches one half.
    ({"top_k": 2, "top_p": 0.5}, [0, 1, 0, 0]),
    ids=str,
)
def test_shares_are_those_of_the_softmax_of_what_is_left(options, weights):
    found = shares_of(Sampler(**options), np.log(SHARES), 4000)
    np.testing.assert_allclose(found, weights / np.sum(weights), atol=0.03)
    np.testing.assert_array_equal(found > 0, np.asarray(weights) > 0)


@tables.cases(
    "values", {"temperature": -1}, {"top_k": 0}, {"top_p": 0}, {"top_p": 1.5}, ids=str
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
        draw(Sampler(temperature, top_p=0.9))
    assert len(traced) == 2 and int(draw(Sampler(0))) == 1


def rows(n):
    return st.lists(st.sampled_from(np.arange(-3, 4) / 2), min_size=n, max_size=n)


@strategies.examples(few=40, many=1000)
@hypothesis.given(
    # Each number of tokens is a program.
    logits=st.sampled_from([1, 3, 12]).flatmap(rows),
    temperature=st.sampled_from([0.5, 1.0, 3.0]),
    top_k=st.sampled_from([None, 1, 2, 5, 14]),
    # None of these is within rounding of a sum of shares that are equal.
    top_p=st.sampled_from([1e-50, 1e-6, 0.0999, 0.35, 0.501, 0.77, 0.913, 1.0]),
)
def test_no_token_outside_of_the_set_is_drawn(logits, temperature, top_k, top_p):
    sampler = Sampler(temperature, top_k=top_k, top_p=top_p)
    allowed = kept(logits, temperature, top_k, top_p)
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
    assert {
        *jax.jit(sampler)(jnp.asarray(logits)[None], jax.random.key(0)).tolist()
    } == {3}


def test_what_is_masked_is_never_drawn():
    logits = np.array([-np.inf, 1.0, -np.inf, 1.0])
    for options in ({}, {"top_k": 4}, {"top_p": 1.0}, {"temperature": 1e-37}):
        assert drawn(Sampler(**options), logits) == {1, 3}


def test_all_of_the_probability_is_all_tokens():
    """Also those behind a sum that is rounded to one."""
    logits = np.array([20.0, *np.zeros(50)])
    sampler = Sampler(top_p=1.0)
    cut, _ = jax.lax.top_k(jnp.broadcast_to(jnp.asarray(logits), (64, 51)), 51)
    assert bool(generation._reach(cut, sampler.top_p).all())
