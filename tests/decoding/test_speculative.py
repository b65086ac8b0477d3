"""Drafts change how often a model is called, and not what it says."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import graftree as nnx
from examples.models import gpt2, llama
from tests import tables
from tests.decoding import conftest, models

generate, speculate = nnx.decoding.generate, nnx.decoding.speculate
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6]]


@pytest.fixture(scope="module")
def draft(model):
    """A model that is right sometimes: the same one, with some noise."""
    noisy = nnx.clone(model)
    params = [x for _, x in nnx.iter_graph(noisy) if isinstance(x, nnx.Param)]
    for seed, param in enumerate(params):
        x = param[...]
        param[...] = x + 0.3 * x.std() * jax.random.normal(
            jax.random.key(seed), x.shape
        )
    return noisy


@pytest.mark.parametrize("draft_tokens", [1, 2, 4])
def test_greedy_tokens_are_those_of_the_model_alone(model, draft, draft_tokens):
    options = {"max_new_tokens": 11}
    expected = generate(model, PROMPTS, **options)
    for second in (draft, model, llama.Llama(conftest.CONFIG, rngs=nnx.Rngs(8))):
        found = speculate(model, second, PROMPTS, draft_tokens=draft_tokens, **options)
        assert found.lists() == expected.lists()
    stop = [expected.lists()[0][4], expected.lists()[1][2:4]]
    found = speculate(model, draft, PROMPTS, stop=stop, **options)
    expected = generate(model, PROMPTS, stop=stop, **options)
    assert found.lists() == expected.lists()
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.stop_lengths, expected.stop_lengths)


class Table(nnx.Module):
    """The next token depends on the last one: logits in a table."""

    def __init__(self, table):
        self.table = nnx.Variable(jnp.asarray(table, jnp.float32))
        self.calls = nnx.Variable(jnp.array(0))

    def init_cache(self, batch, max_length):
        return {}

    def __call__(self, tokens, *, positions, cache):
        self.calls[...] += 1
        return self.table[...][tokens]


@pytest.mark.long
def test_a_draft_that_is_right_saves_calls():
    table = 9 * np.eye(10, k=1)
    model, draft = Table(table), Table(table)
    found = speculate(model, draft, [[0], [1]], max_new_tokens=8, draft_tokens=3)
    assert found.lists() == [[1, 2, 3, 4, 5, 6, 7, 8], [2, 3, 4, 5, 6, 7, 8, 9]]
    assert model.calls[...] == 1 + 2  # the prompt makes one, and two rounds four each
    assert draft.calls[...] == 1 + 2 * 4
    wrong = Table(9 * np.eye(10))
    model = Table(table)
    found = speculate(model, wrong, [[0]], max_new_tokens=5, draft_tokens=3)
    assert found.lists() == [[1, 2, 3, 4, 5]] and model.calls[...] == 5


SIZE, COUNT, ROWS = 3, 4, 40_000


@tables.cases(
    "sampler",
    nnx.decoding.Sampler(),
    nnx.decoding.Sampler(temperature=0.7, top_k=2),
    nnx.decoding.Sampler(temperature=1.3, top_p=0.8),
    nnx.decoding.Sampler(min_p=0.4),
)
@pytest.mark.parametrize("draft_tokens", [1, 3])
def test_samples_have_the_distribution_of_the_model(sampler, draft_tokens):
    rng = np.random.default_rng(3)
    model, draft = (Table(rng.normal(size=(SIZE, SIZE))) for _ in range(2))
    rows = jnp.zeros((ROWS, 1), jnp.int32)
    options = {"max_new_tokens": COUNT, "draft_tokens": draft_tokens}
    key = jax.random.key(5)
    made = speculate(model, draft, rows, sampler=sampler, key=key, **options).tokens
    chances = np.asarray(sampler.probabilities(model.table[...]), np.float64)
    exact = {
        row: np.prod([chances[a, b] for a, b in itertools.pairwise((0, *row))])
        for row in itertools.product(range(SIZE), repeat=COUNT)
    }
    found, counts = np.unique(made, axis=0, return_counts=True)
    counts = dict(zip(map(tuple, found.tolist()), counts, strict=True))
    assert all(exact[row] > 0 for row in counts)
    expected = {row: ROWS * x for row, x in exact.items() if x > 0}
    chi2 = sum((counts.get(row, 0) - x) ** 2 / x for row, x in expected.items())
    freedom = len(expected) - 1
    # Nine in a million samples of a right one are further off.
    assert chi2 < freedom + 4.3 * np.sqrt(2 * freedom) + 7


@pytest.mark.long
def test_probabilities_are_how_often_a_sampler_draws():
    logits = jnp.array([[1.0, -0.5, 0.3, 0.3], [0.0, 0.0, 2.0, -1.0]])
    for sampler in (
        nnx.decoding.Sampler(0),
        nnx.decoding.Sampler(jnp.array(0.0), top_k=3),
        nnx.decoding.Sampler(0.8, top_k=3, top_p=0.9, min_p=0.2),
    ):
        keys = jax.random.split(jax.random.key(0), 4000)
        drawn = jax.vmap(sampler, in_axes=(None, 0))(logits, keys)
        shares = jax.nn.one_hot(drawn, 4).mean(axis=0)
        np.testing.assert_allclose(sampler.probabilities(logits), shares, atol=0.03)


@pytest.mark.long
def test_it_may_end_at_the_last_position(model, draft):
    sizes = {"vocab_size": 40, "n_positions": 12, "n_embd": 8, "n_layer": 1}
    config = gpt2.Config(**sizes, n_head=2, layer_norm_epsilon=1e-5)
    large, small = (gpt2.GPT2(config, rngs=nnx.Rngs(seed)) for seed in range(2))
    prompts = [[1, 2, 3, 4, 5], [6]]
    found = speculate(large, small, prompts, max_new_tokens=7)
    assert found.lists() == generate(large, prompts, max_new_tokens=7).lists()


@pytest.mark.long
def test_it_may_be_part_of_a_program(model, draft):
    prompts = jnp.array([[3, 1, 4, 1], [9, 2, 0, 0]])
    options = {"max_new_tokens": 6, "pad": 0}
    expected = generate(model, prompts, **options).tokens
    for jit in (jax.jit, nnx.jit):
        call = jit(lambda *args: speculate(*args, **options).tokens)
        np.testing.assert_array_equal(call(model, draft, prompts), expected)
    program = jax.jit(lambda rows: speculate(model, draft, rows, **options).tokens)
    shape = jax.ShapeDtypeStruct(export.symbolic_shape("batch, 4"), jnp.int32)
    again = export.deserialize(export.export(program)(shape).serialize()).call
    np.testing.assert_array_equal(again(prompts[:1]), expected[:1])


class Cached(Table):
    def __init__(self, make):
        super().__init__(np.eye(40))
        self.make = make

    def init_cache(self, batch, max_length):
        return {"own": self.make(batch, max_length)}

    def __call__(self, tokens, *, positions, cache):
        own = cache["own"]
        if isinstance(own, nnx.decoding.KeyValueCache):
            x = jnp.zeros((*tokens.shape, 1, 2))
            own.extend(x, x, positions)
        else:
            cache["own"] = own + 1
        return super().__call__(tokens, positions=positions, cache=cache)


@tables.cases(
    "make, where",
    (
        lambda batch, length: nnx.decoding.KeyValueCache(
            batch, length, kv_heads=1, head_dim=2, window=3
        ),
        r"cache\.own\.key",
    ),
    (lambda batch, length: jnp.zeros((batch, 2)), r"cache\.own"),
    ids=["ring", "sums"],
)
def test_a_cache_that_can_not_forget_is_refused(model, make, where):
    for pair in ((model, Cached(make)), (Cached(make), model)):
        with pytest.raises(ValueError, match=rf"forget(?s:.*){where}(?s:.*)mask"):
            speculate(*pair, PROMPTS, max_new_tokens=4)


class Owner(Table):
    def init_cache(self, batch, max_length):
        return {"calls": self.calls}


def test_wrong_arguments(model):
    with pytest.raises(ValueError, match="draft_tokens must be at least 1, got 0"):
        speculate(model, model, PROMPTS, max_new_tokens=4, draft_tokens=0)
    with pytest.raises(TypeError, match="draft= expects a model with a method"):
        speculate(model, nnx.Linear, PROMPTS, max_new_tokens=4)
    with pytest.raises(ValueError, match="part of the model"):
        speculate(model, Owner(np.eye(40)), PROMPTS, max_new_tokens=4)
    with pytest.raises(ValueError, match=r"(?s)not for the tokens.*40\], .*\[3,9\]"):
        speculate(Table(np.eye(40)), Table(np.eye(9)), PROMPTS, max_new_tokens=4)


def test_a_model_for_which_drafts_count_as_length_is_refused():
    grows, fixed = (
        models.Attends(rope=nnx.RoPE(2.0, scaling=models.DYNAMIC, **options))
        for options in ({}, {"seq_len": 16})
    )
    prompts = [[3, 1, 4]]
    with pytest.raises(ValueError, match=r"(?s)RoPE whose angles.*rope.*seq_len="):
        speculate(grows, fixed, prompts, max_new_tokens=6)
    made = speculate(fixed, grows, prompts, max_new_tokens=6).lists()
    assert made == generate(fixed, prompts, max_new_tokens=6).lists()
