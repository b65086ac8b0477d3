"""How layers draw keys and make their Params."""

import jax
import jax.numpy as jnp

import graftree as nnx
from graftree.nn.support import computation, parameters


def test_a_param_draws_one_key_even_if_the_initializer_ignores_it():
    rngs = nnx.Rngs(0)
    parameters.new_param(rngs, nnx.initializers.zeros, (2,), jnp.float32, {})
    assert rngs.default.count[...] == 1


def test_the_key_comes_from_the_stream_params():
    key = parameters.draw_key(nnx.Rngs(7, params=3))
    assert key == jax.random.fold_in(jax.random.key(3), 0)


def test_an_absent_param_draws_nothing_and_reads_as_none():
    layer = nnx.Linear(2, 3, use_bias=False, rngs=(rngs := nnx.Rngs(0)))
    assert rngs.default.count[...] == 1
    assert computation.read(layer.bias) is None
