"""How layers draw keys and make their Params."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


def test_metadata_of_the_initializer_wins_over_that_of_the_layer():
    init = nnx.with_metadata(nnx.initializers.ones, tag="initializer")
    param = parameters.new_param(
        nnx.Rngs(0), init, (2,), jnp.float32, {"tag": "layer", "other": 1}
    )
    assert (param.tag, param.other) == ("initializer", 1)
    np.testing.assert_array_equal(param[...], [1, 1])


@pytest.mark.parametrize("rngs", [0, jax.random.key(0), nnx.RngStream(0, tag="x")])
def test_something_other_than_rngs_is_named(rngs):
    with pytest.raises(AttributeError, match=r"(?s)params.*Rngs"):
        nnx.Linear(2, 3, rngs=rngs)


def test_missing_stream_is_named():
    with pytest.raises(AttributeError, match="No RngStream named 'params'"):
        nnx.Linear(2, 3, rngs=nnx.Rngs(dropout=0))
