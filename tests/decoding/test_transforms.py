"""`generate` as part of a larger program: its tokens are those that it gives alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import tables

generate = nnx.decoding.generate
PROMPTS = jnp.array([[3, 1, 4, 1], [9, 2, 0, 0]])
OPTIONS = {"max_new_tokens": 5, "pad": 0}
DRAWN = {"sampler": nnx.decoding.Sampler(temperature=0.8, top_k=5), "stop": [2, [1, 1]]}


@tables.cases(
    "more",
    ({}),
    (DRAWN | {"key": jax.random.key(1)}),
    ({"processors": [nnx.decoding.RepetitionPenalty(1.5)]}),
    ({"padded_length": 7}),
)
def test_tokens_in_a_program_are_those_of_a_call(model, more):
    expected = generate(model, PROMPTS, **OPTIONS, **more).lists()
    for jit in (jax.jit, nnx.jit):
        call = jit(lambda model, tokens: generate(model, tokens, **OPTIONS, **more))
        found = call(model, PROMPTS)
        assert isinstance(found.tokens, jax.Array) and found.lists() == expected
        if not more:
            padded_left = jnp.roll(PROMPTS, 2, axis=1).at[0].set(PROMPTS[0])
            assert call(model, padded_left).lists() == expected


@pytest.mark.long
def test_sampler_and_key_may_be_traced(model):
    call = jax.jit(
        lambda model, sampler, key: generate(
            model, PROMPTS, **OPTIONS, sampler=sampler, key=key
        )
    )
    for seed in range(2):
        given = nnx.decoding.Sampler(temperature=0.9), jax.random.key(seed)
        alone = generate(model, PROMPTS, **OPTIONS, sampler=given[0], key=given[1])
        assert call(model, *given).lists() == alone.lists()


@pytest.mark.long
@tables.cases("more", {}, {"num_beams": 3})
def test_prompts_may_be_mapped(model, more):
    call = nnx.decoding.beam_search if more else generate
    alone = call(model, PROMPTS, **OPTIONS, **more)
    one = lambda row: call(model, row[None], **OPTIONS, **more).tokens[0]  # noqa: E731
    np.testing.assert_array_equal(jax.vmap(one)(PROMPTS), alone.tokens)


@tables.cases(
    "call, error, message",
    (
        lambda model, n: generate(model, PROMPTS, max_new_tokens=n),
        TypeError,
        r"max_new_tokens= is part of the program.*\n.*static_argnames='max_new_tokens'",
    ),
    (
        lambda model, n: generate(model, PROMPTS, max_new_tokens=2, stop=[n]),
        TypeError,
        "stop= is part of the program",
    ),
    (
        lambda model, n: generate(model, n + PROMPTS[0], max_new_tokens=2),
        TypeError,
        r"as one array in a transform; got int32\[4\]",
    ),
    (
        lambda model, n: generate(model, [[n, 1], [2]], max_new_tokens=2),
        TypeError,
        r"as one array, \[batch, length\], but got a list.*\n.*pad=0",
    ),
    (
        lambda model, n: generate(model, n + PROMPTS, max_new_tokens=10_000),
        ValueError,
        "longest prompt 4, max_new_tokens=10000",
    ),
    (
        lambda model, n: nnx.decoding.stream(model, PROMPTS, max_new_tokens=2),
        TypeError,
        r"stream yields tokens.*\n.*nnx.decoding.generate instead",
    ),
)
def test_what_a_program_can_not_have_says_the_way_out(model, call, error, message):
    with pytest.raises(error, match=message):
        jax.jit(call)(model, 3)
