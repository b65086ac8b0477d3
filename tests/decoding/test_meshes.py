"""Prompts and heads that a mesh divides: tokens are those of one device."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import graftree as nnx
from tests import meshes

decoding = nnx.decoding
PROMPTS = np.array(
    [[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 0, 0], [5, 8, 9, 7, 9, 0], [9, 3, 0, 0, 0, 0]]
)


class Model(nnx.Module):
    """A block with grouped heads and a gated MLP; ``out`` is where its outputs are."""

    def __init__(self, rngs, window=None, out=None):
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.embed = nnx.Embed(32, 16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            *(4, 16),
            num_kv_heads=2,
            use_bias=False,
            rope=nnx.RoPE(),
            sliding_window=window,
            decode=False,
            rngs=rngs,
        )
        self.up, self.down = linear(16, 32), linear(32, 16)
        self.options = {} if out is None else {"out_sharding": out}

    def init_cache(self, batch, max_length):
        return self.attention.make_cache(batch, max_length)

    def __call__(self, tokens, *, positions, cache):
        x = self.embed(tokens)
        x += self.attention(x, positions=positions, cache=cache, **self.options)
        x += self.down(nnx.silu(self.up(x)), **self.options)
        return self.embed.attend(x)


SPECS = {
    "query": P(None, "tensor"),
    "key": P(None, "tensor"),
    "value": P(None, "tensor"),
    "out": P("tensor"),
    "up": P(None, "tensor"),
    "down": P("tensor"),
}


def divided(model, mesh):
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        sharding = NamedSharding(mesh, SPECS.get(path[-2], P()))
        variable.set_value(jax.device_put(variable.get_value(), sharding))
    return model


OPTIONS = {"max_new_tokens": 4, "pad": 0}
CALLS = {
    "greedy": lambda model, rows: decoding.generate(
        model, rows, stop=[7, [3, 4], 11], **OPTIONS
    ),
    "drawn": lambda model, rows: decoding.generate(
        model,
        rows,
        sampler=decoding.Sampler(temperature=0.8, top_k=9, top_p=0.9),
        processors=[decoding.RepetitionPenalty(1.2)],
        key=jax.random.key(1),
        **OPTIONS,
    ),
    "beams": lambda model, rows: decoding.beam_search(
        model, rows, num_beams=2, stop=[7], **OPTIONS
    ),
    "drafts": lambda model, rows: decoding.speculate(model, model, rows, **OPTIONS),
}


@functools.cache
def on_one_device(name, window):
    return CALLS[name](Model(nnx.Rngs(0), window), PROMPTS)


@pytest.mark.parametrize(
    ("kind", "in_jit", "window"),
    [
        ("Explicit", True, None),
        ("Explicit", False, None),
        pytest.param("Explicit", True, 3, marks=pytest.mark.long),
        pytest.param("Auto", True, None, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("name", CALLS)
def test_prompts_and_heads_on_a_mesh_make_the_same_tokens(name, kind, in_jit, window):
    if name == "drafts" and window:
        return  # a ring can't forget drafts
    expected = on_one_device(name, window)
    mesh = meshes.mesh_of(kind, data=2, tensor=2)
    with jax.set_mesh(mesh):
        out = P("data") if kind == "Explicit" else None
        model = divided(Model(nnx.Rngs(0), window, out), mesh)
        rows = jax.device_put(PROMPTS, NamedSharding(mesh, P("data")))
        made = (nnx.jit(CALLS[name]) if in_jit else CALLS[name])(model, rows)
    assert made.lists() == expected.lists()
    if in_jit and kind == "Explicit":
        assert jax.typeof(made.tokens).sharding.spec[0] == "data"
    if expected.scores is not None:
        np.testing.assert_allclose(made.scores, expected.scores, rtol=1e-5)
