"""Beam search finds what transformers finds, with any cache, in any program."""

import dataclasses
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from examples.models import llama
from tests import tables, tiny_llamas
from tests.decoding import conftest, models

generate, beam_search = nnx.decoding.generate, nnx.decoding.beam_search
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6]]

# Written by scripts/beams_of_transformers.py.
RECORD = pathlib.Path(__file__).with_name("beams_of_transformers.json")
TRANSFORMERS = json.loads(RECORD.read_text())


@pytest.fixture(scope="module")
def twin():
    """The Llama with which the beams were recorded."""
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in sorted(TRANSFORMERS["shapes"].items()):
        x = rng.normal(size=shape)
        x = 1 + 0.1 * x if len(shape) == 1 else 0.4 * x
        tensors[name] = x.astype(np.float32)
    config = dataclasses.replace(tiny_llamas.CONFIG, num_hidden_layers=1, vocab_size=12)
    model = llama.Llama(config, rngs=nnx.Rngs(0))
    return nnx.weights.load(tensors, model, llama.WEIGHTS)


@pytest.mark.parametrize("case", TRANSFORMERS["cases"], ids=lambda x: str(x["setting"]))
def test_sequences_and_scores_are_those_of_transformers(twin, case):
    beams, results, penalty, early_stopping, count, stop, repetition = case["setting"]
    processors = [nnx.decoding.RepetitionPenalty(repetition)] if repetition else []
    found = beam_search(
        twin,
        TRANSFORMERS["prompts"],
        num_beams=beams,
        num_return_sequences=results,
        length_penalty=penalty,
        early_stopping=early_stopping,
        max_new_tokens=count,
        stop=stop,
        processors=processors,
    )
    assert found.lists() == case["tokens"]
    np.testing.assert_allclose(found.scores, case["scores"], rtol=5e-6)
    stops = [[x] if isinstance(x, int) else x for x in stop]
    lengths = [
        max([len(x) for x in stops if row[-len(x) :] == x], default=0)
        for row in case["tokens"]
    ]
    assert found.stop_lengths.tolist() == lengths


class Recurrent(nnx.Module):
    """Two layers whose states are in a cache of some form."""

    def __init__(self, form="dict", rngs=None):
        rngs = rngs or nnx.Rngs(0)
        self.form = form
        self.embed = nnx.Embed(6, 4, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
        for layer in self.layers:
            layer.kernel[...] *= 3
        self.calls = nnx.Variable(jnp.array(0))

    def init_cache(self, batch, max_length):
        self.calls[...] += 1
        states = jnp.zeros((2, batch, 4))
        return {
            "dict": lambda: {"states": [*states]},
            "stacked": lambda: {"states": states},
            "batch last": lambda: {"states": jnp.moveaxis(states, 1, -1)},
            "variables": lambda: nnx.List([nnx.Cache(x) for x in states]),
            "tree in a variable": lambda: (nnx.Variable({"a": [*states]}),),
            "constants": lambda: {"states": [*states], "of": (states[0] + 1, 3.0)},
        }[self.form]()

    def read(self, cache):
        if self.form == "batch last":
            return [*jnp.moveaxis(cache["states"], -1, 1)]
        if self.form == "variables":
            return [x[...] for x in cache]
        if self.form == "tree in a variable":
            return cache[0].get_value()["a"]
        return [*cache["states"]]

    def write(self, cache, states):
        if self.form == "batch last":
            cache["states"] = jnp.moveaxis(jnp.stack(states), 1, -1)
        elif self.form == "stacked":
            cache["states"] = jnp.stack(states)
        elif self.form == "variables":
            for variable, state in zip(cache, states, strict=True):
                variable[...] = state
        elif self.form == "tree in a variable":
            cache[0].set_value({"a": states})
        else:
            cache["states"] = states

    def __call__(self, tokens, *, positions, cache):
        outputs, states = [], self.read(cache)
        for x in jnp.moveaxis(self.embed(tokens), 1, 0):
            for i, layer in enumerate(self.layers):
                states[i] = x = jnp.tanh(layer(states[i]) + x)
            outputs.append(2 * self.embed.attend(x))
        self.write(cache, states)
        return jnp.stack(outputs, axis=1)


FORMS = "dict|stacked|batch last|variables|tree in a variable|constants".split("|")
PAIR = [[3, 1], [4, 2]]
OPTIONS = {"num_beams": 3, "max_new_tokens": 5, "padded_length": 2}


def log_prob(model, prompt, tokens):
    """The log probability of tokens that follow a prompt, read in one call."""
    row = jnp.array([[*prompt, *tokens]])
    cache = model.init_cache(1, row.shape[1])
    positions = jnp.arange(row.shape[1])[None]
    logits = np.asarray(model(row, positions=positions, cache=cache)[0], np.float64)
    logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    start = len(prompt) - 1
    return sum(logits[start + i, token] for i, token in enumerate(tokens))


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_any_cache_follow_their_beams(form):
    # As many layers as prompts: sizes alone don't say which axis is the batch.
    model = Recurrent(form)
    found = beam_search(model, PAIR, num_return_sequences=3, **OPTIONS)
    assert model.calls[...] == 1  # cache made and prompt read once, for all beams
    expected = beam_search(Recurrent(), PAIR, num_return_sequences=3, **OPTIONS)
    assert found.lists() == expected.lists()
    for i, (row, score) in enumerate(zip(found.lists(), found.scores, strict=True)):
        exact = log_prob(Recurrent(), PAIR[i // 3], row) / 5
        np.testing.assert_allclose(score, exact, rtol=1e-5)


def test_the_widest_search_finds_the_likeliest_of_all_sequences():
    model = Recurrent()
    found = beam_search(
        model,
        PAIR,
        num_beams=36,
        max_new_tokens=3,
        num_return_sequences=8,
        padded_length=2,
    )
    for i, prompt in enumerate(PAIR):
        rows = {
            row: log_prob(model, prompt, row) / 3
            for row in itertools.product(range(6), repeat=3)
        }
        best = sorted(rows, key=rows.get, reverse=True)[:8]
        assert found.lists()[8 * i : 8 * i + 8] == [[*row] for row in best]
        scores = found.scores[8 * i : 8 * i + 8]
        np.testing.assert_allclose(scores, [rows[row] for row in best], rtol=1e-5)


@pytest.mark.long
def test_a_ring_follows_its_beams():
    model = models.Attends(rope=nnx.RoPE(), sliding_window=3)
    found = beam_search(
        model, PROMPTS, num_beams=4, num_return_sequences=2, max_new_tokens=7
    )
    for i, (row, score) in enumerate(zip(found.lists(), found.scores, strict=True)):
        exact = log_prob(model, PROMPTS[i // 2], row) / 7
        np.testing.assert_allclose(score, exact, rtol=1e-5)


@pytest.mark.long
def test_prompts_are_searched_as_if_each_were_the_only_one(model):
    options = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 5}
    options["stop"] = [1, [15, 19]]
    together = beam_search(model, PROMPTS, **options)
    for i, prompt in enumerate(PROMPTS):
        alone = beam_search(model, [prompt], **options)
        assert alone.lists() == together.lists()[2 * i : 2 * i + 2]
        scores = together.scores[2 * i : 2 * i + 2]
        np.testing.assert_allclose(alone.scores, scores, rtol=1e-5)


def test_one_beam_is_greedy(model):
    options = {"max_new_tokens": 5, "stop": [25]}
    found = beam_search(model, PROMPTS, num_beams=1, **options)
    assert found.lists() == generate(model, PROMPTS, **options).lists()


def only(logits, history):
    """Allows one sequence: each token is one more than the last."""
    return jnp.where(
        jnp.arange(logits.shape[-1])[None] == history.last[:, None] + 1, 0.0, -jnp.inf
    )


def test_where_there_are_fewer_sequences_the_others_are_empty():
    options = {"num_return_sequences": 2, "processors": [only], "stop": [5]}
    found = beam_search(Recurrent(), PAIR, **OPTIONS, **options)
    assert found.lists() == [[2, 3, 4, 5], [], [3, 4, 5], []]
    assert found.lists(with_stop=False) == [[2, 3, 4], [], [3, 4], []]
    assert found.scores.tolist() == [0, -np.inf, 0, -np.inf]


@pytest.mark.long
@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("jit", [jax.jit, nnx.jit])
def test_a_search_may_be_part_of_a_program(jit, graph):
    prompts = jnp.array(PAIR)
    expected = beam_search(Recurrent(), prompts, **OPTIONS)
    with nnx.set_graph_mode(graph):
        call = jit(
            lambda model, rows, penalty: beam_search(
                model, rows, length_penalty=penalty, **OPTIONS
            )
        )
        found = call(Recurrent("variables"), prompts, 1.0)
    assert isinstance(found.tokens, jax.Array)
    assert found.lists() == expected.lists()
    np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-6)


@pytest.mark.long
def test_a_model_of_half_precision_is_searched_in_float32():
    model = llama.Llama(conftest.CONFIG, rngs=nnx.Rngs(0))
    nnx.precision.set_policy(model, "params=f32, compute=bf16, output=bf16")
    found = beam_search(model, PROMPTS, num_beams=2, max_new_tokens=3)
    assert found.scores.dtype == np.float32


class Odd(Recurrent):
    """Has a second array in its cache."""

    def __init__(self, make, act=lambda x: x):
        super().__init__()
        self.make, self.act = make, act

    def init_cache(self, batch, max_length):
        return {**super().init_cache(batch, max_length), "odd": self.make(batch)}

    def __call__(self, tokens, *, positions, cache):
        cache["odd"] = self.act(cache["odd"])
        return super().__call__(tokens, positions=positions, cache=cache)


@tables.cases(
    "make, act, where",
    (lambda batch: jnp.zeros(3 * batch), lambda x: x, r"float32\[6\], no axis"),
    (lambda batch: jnp.zeros((batch, batch)), lambda x: x, r"float32\[2,2\], no axis"),
    (lambda batch: jnp.zeros(7), lambda x: x + 1, r"float32\[7\], a call writes"),
    ids=["flattened", "twice", "shared"],
)
def test_what_can_not_be_reordered_is_an_error(make, act, where):
    model = Odd(make, act)
    with pytest.raises(ValueError, match=rf"cache\.odd: {where}(?s:.*)of size bat"):
        beam_search(model, PAIR, **OPTIONS)
    assert model.calls[...] == 0


@tables.cases(
    "make, act",
    (lambda batch: jnp.zeros(7), lambda x: x),
    (lambda batch: jnp.array(0), lambda x: x + 1),
    ids=["constant", "scalar"],
)
def test_what_is_the_same_for_all_rows_stays(make, act):
    expected = beam_search(Recurrent(), PAIR, **OPTIONS).lists()
    assert beam_search(Odd(make, act), PAIR, **OPTIONS).lists() == expected


@tables.cases(
    "options, error",
    ({"num_beams": 0}, "num_beams must be at least 1, got 0"),
    ({"num_return_sequences": 4}, "from 1 to num_beams=3, got 4"),
    ({"early_stopping": "always"}, "True, False or .never., got 'always'"),
    ({"max_new_tokens": 0}, "at least 1"),
    ids=["beams", "results", "early", "tokens"],
)
def test_settings_out_of_range(options, error):
    with pytest.raises(ValueError, match=error):
        beam_search(Recurrent(), PAIR, **OPTIONS | options)


def test_settings_that_decide_the_program_are_static():
    with pytest.raises(TypeError, match="num_beams= is part of the program"):
        jax.jit(
            lambda beams: beam_search(
                Recurrent(), PAIR, num_beams=beams, max_new_tokens=2
            )
        )(2)
