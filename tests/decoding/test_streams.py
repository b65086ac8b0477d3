"""A stream is the tokens of `generate`, part by part; and leaves nothing half-done."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import tables
from tests.decoding import models
from tests.decoding.conftest import joined

generate, stream = nnx.decoding.generate, nnx.decoding.stream
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6]]


SAMPLER = nnx.decoding.Sampler(1.5, top_k=30, top_p=0.95, min_p=0.01)


@tables.cases("chunk, sizes", (1, [1] * 7), (3, [3, 3, 1]), (7, [7]), (9, [7]))
@pytest.mark.parametrize("graph", [True, False])
def test_the_tokens_are_those_of_generate(model, chunk, sizes, graph):
    options = {
        "max_new_tokens": 7,
        "sampler": SAMPLER,
        "key": jax.random.key(5),
        "processors": [nnx.decoding.RepetitionPenalty(1.3)],
    }
    with nnx.set_graph_mode(graph):
        parts = [*stream(model, PROMPTS, chunk=chunk, **options)]
        assert joined(parts) == generate(model, PROMPTS, **options).lists()
    assert [part.tokens.shape for part in parts] == [(3, size) for size in sizes]


@tables.cases("decode", "generate", "stream", "beam_search", "speculate")
def test_in_tree_mode_weights_may_be_tied(decode):
    def tokens():
        model = models.Attends()
        model.tied = model.embed
        more = (models.Attends(),) if decode == "speculate" else ()
        options = {"max_new_tokens": 2, "padded_length": 4}
        if decode == "beam_search":
            options["num_beams"] = 2
        result = getattr(nnx.decoding, decode)(model, *more, [[1, 2], [3]], **options)
        return joined(result) if decode == "stream" else result.lists()

    expected = tokens()
    with nnx.set_graph_mode(False):
        assert tokens() == expected


@pytest.mark.long
def test_it_ends_with_the_last_sequence(model):
    whole = generate(model, PROMPTS, max_new_tokens=20).lists()
    options = {"max_new_tokens": 20, "stop": [[*row[2:4]] for row in whole]}
    made = generate(model, PROMPTS, **options)
    parts = [*stream(model, PROMPTS, **options)]
    assert joined(parts) == made.lists()
    assert len(parts) == made.lengths.max() <= 4
    assert [part.lengths.tolist() for part in parts][:2] == [[1, 1, 1]] * 2


def test_two_programs_for_all_that_is_streamed(watched):
    model, traced = watched
    options = {"max_new_tokens": 5, "chunk": 2}
    for n, length in enumerate((2, 9, 16)):
        sampler, key = nnx.decoding.Sampler(1.0 + n), jax.random.key(n)
        prompts = [[1] * length, [2]]
        for _ in stream(model, prompts, sampler=sampler, key=key, **options):
            pass
    # The first one is shown the next step, too, to refuse it before anything is done.
    assert traced == [(2, 16), (2, 1), (2, 1)]


def count_and_drop(model, x):
    model.calls[...] += 1
    return model.dropout(x)


@pytest.mark.parametrize("chunk", [1, 2])
def test_a_stream_that_is_left_has_made_its_parts_only(chunk):
    model, other = (models.Writer(count_and_drop) for _ in range(2))
    parts = stream(model, [[1]], max_new_tokens=8, chunk=chunk)
    assert model.calls[...] == 0
    made = [next(parts), next(parts)]
    parts.close()
    expected = generate(other, [[1]], max_new_tokens=2 * chunk)
    assert joined(made) == expected.lists()
    keyless = nnx.Not(nnx.RngKey)
    state, like = (nnx.as_pure(nnx.state(x, keyless)) for x in (model, other))
    for one, two in zip(jax.tree.leaves(state), jax.tree.leaves(like), strict=True):
        assert isinstance(one, jax.Array) and not isinstance(one, jax.core.Tracer)
        np.testing.assert_array_equal(one, two)
    again = [generate(x, [[1]], max_new_tokens=3).lists() for x in (model, other)]
    assert again[0] == again[1]


@pytest.mark.long
def test_two_streams_of_one_model_keep_apart(model):
    one, two = (stream(model, [row], max_new_tokens=4) for row in PROMPTS[:2])
    pairs = [*zip(one, two, strict=True)]
    for row, parts in zip(PROMPTS, zip(*pairs, strict=True), strict=False):
        assert joined(parts) == generate(model, [row], max_new_tokens=4).lists()


def test_a_cache_may_be_a_dict_of_arrays():
    class Sums(nnx.Module):
        def init_cache(self, batch, max_length):
            return {"sum": jnp.zeros((batch, 1), int)}

        def __call__(self, tokens, *, positions, cache):
            sums = cache["sum"] + jnp.cumsum(tokens, axis=1)
            cache["sum"] = sums[:, -1:]
            return jax.nn.one_hot(sums % 10, 10)

    options = {"max_new_tokens": 5, "padded_length": 2}
    expected = [[3, 6, 2, 4, 8], [7, 4, 8, 6, 2]]
    assert generate(Sums(), [[1, 2], [3, 4]], **options).lists() == expected
    assert joined(stream(Sums(), [[1, 2], [3, 4]], **options)) == expected


def test_a_cache_is_no_part_of_the_model():
    class Owner(models.Writer):
        def init_cache(self, batch, max_length):
            return {"seen": self.calls}

    with pytest.raises(ValueError, match="part of the model.*\n.*Make new ones"):
        next(stream(Owner(count_and_drop), [[1]], max_new_tokens=3))


@tables.cases(
    "wrong, more, error",
    ([[1]], {"chunk": 0}, "stream: chunk must be at least 1"),
    ([[]], {}, "stream needs prompts"),
    ([[1]], {"sampler": SAMPLER}, "stream needs key="),
    ([[1, -1]], {}, "stream: -1 is not a token"),
    ids=["chunk", "empty", "key", "token"],
)
def test_wrong_arguments_are_errors_at_the_call(model, wrong, more, error):
    with pytest.raises(ValueError, match=error):
        stream(model, wrong, max_new_tokens=3, **more)


def test_what_is_no_model_is_an_error_at_the_call():
    with pytest.raises(TypeError, match="expects a model with a method init_cache"):
        stream(nnx.Linear, [[1]], max_new_tokens=3)
