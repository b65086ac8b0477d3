"""What an encoder reads: it gets there once, row by row, in any program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import graftree as nnx
from tests import tables
from tests.decoding.conftest import joined

generate, stream = nnx.decoding.generate, nnx.decoding.stream
beams = functools.partial(nnx.decoding.beam_search, num_beams=3)


class Adds(nnx.Module):
    """The next token is the last one plus the sum of the inputs, modulo 10."""

    def __init__(self):
        self.encoded = nnx.Variable(jnp.array(0))

    def encode(self, inputs):
        self.encoded[...] += 1
        return jnp.sum(inputs, axis=1)

    def init_cache(self, batch, max_length, inputs):
        return {"encoded": (self.encode(inputs["numbers"]), inputs["scale"])}

    def __call__(self, tokens, *, positions, cache):
        sums, scale = cache["encoded"]
        return 9 * jax.nn.one_hot((tokens + scale * sums[:, None]) % 10, 10)


PROMPTS = [[1, 2], [5], [9]]
INPUTS = {"numbers": np.array([[1, 1], [1, 2], [0, 1]], np.int32), "scale": 1}
EXPECTED = [[4, 6, 8, 0], [8, 1, 4, 7], [0, 1, 2, 3]]
OPTIONS = {"inputs": INPUTS, "max_new_tokens": 4}


def test_each_prompt_has_its_inputs_and_they_are_encoded_once():
    for call in (
        lambda model: generate(model, PROMPTS, **OPTIONS).lists(),
        lambda model: beams(model, PROMPTS, **OPTIONS).lists(),
        lambda model: joined(stream(model, PROMPTS, chunk=3, **OPTIONS)),
    ):
        model = Adds()
        assert call(model) == EXPECTED
        assert model.encoded[...] == 1


@pytest.mark.parametrize("jit", [jax.jit, nnx.jit])
@tables.cases("call", generate, beams)
def test_inputs_may_be_traced(jit, call):
    @jit
    def program(model, numbers):
        inputs = {**INPUTS, "numbers": numbers}
        return call(model, PROMPTS, inputs=inputs, max_new_tokens=4)

    assert program(Adds(), INPUTS["numbers"]).lists() == EXPECTED


@tables.cases("call", generate, beams)
def test_an_encoder_can_be_exported_for_any_batch(call):
    model = Adds()

    def program(prompts, numbers):
        inputs = {"numbers": numbers, "scale": 1}
        return call(nnx.clone(model), prompts, inputs=inputs, max_new_tokens=4).tokens

    shapes = export.symbolic_args_specs(
        (jnp.zeros((3, 1), jnp.int32), INPUTS["numbers"]), ("b, 1", "b, 2")
    )
    exported = export.export(jax.jit(program))(*shapes)
    again = export.deserialize(exported.serialize()).call
    prompts = jnp.array([[2], [5], [9]], jnp.int32)
    for count in (3, 2):
        tokens = again(prompts[:count], INPUTS["numbers"][:count])
        assert tokens.tolist() == EXPECTED[:count]


def test_one_program_for_all_inputs_of_a_shape():
    traced = []

    class Watched(Adds):
        def encode(self, inputs):
            traced.append(inputs.shape)
            return super().encode(inputs)

    model = Watched()
    for number in range(3):
        inputs = {**INPUTS, "numbers": INPUTS["numbers"] + number}
        generate(model, PROMPTS, inputs=inputs, max_new_tokens=2)
    assert traced == [(3, 2)]


class Plain(Adds):
    def init_cache(self, batch, max_length):
        return {"encoded": (jnp.zeros(batch, int), 1)}


@tables.cases("call", generate, stream, beams)
def test_inputs_go_with_a_model_that_takes_them(call):
    with pytest.raises(TypeError, match=r"with inputs= calls (?s:.*)too many(?s:.*)no"):
        call(Plain(), PROMPTS, **OPTIONS)
    with pytest.raises(TypeError, match=r"without inputs= .*\n.*missing a required"):
        call(Adds(), PROMPTS, max_new_tokens=4)
    fewer = {"numbers": INPUTS["numbers"][:2], "scale": jnp.array(1)}
    with pytest.raises(ValueError, match=r"3 prompts(?s:.*)inputs\.numbers: int32"):
        call(Adds(), PROMPTS, inputs=fewer, max_new_tokens=4)
