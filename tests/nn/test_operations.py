"""Operations under an inlined ``jax.jit``: the same numbers, the same equations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from graftree.nn import operations


def draw(*shape):
    return jax.random.normal(jax.random.key(len(shape)), shape)


@pytest.mark.parametrize(
    ("operation", "plain"),
    [
        (
            lambda: operations.add(draw(2, 3, 4), draw(12), (1, 3, 4)),
            lambda: draw(2, 3, 4) + draw(12).reshape(1, 3, 4),
        ),
        (
            lambda: operations.multiply(draw(2, 3, 1), draw(4), (1, 1, 4)),
            lambda: draw(2, 3, 1) * draw(4).reshape(1, 1, 4),
        ),
        (
            lambda: operations.dot_general(
                draw(2, 3), draw(3), (((1,), (0,)), ((), ()))
            ),
            lambda: jax.lax.dot_general(draw(2, 3), draw(3), (((1,), (0,)), ((), ()))),
        ),
        (lambda: operations.rsqrt(draw(9) ** 2), lambda: jax.lax.rsqrt(draw(9) ** 2)),
        (
            lambda: operations.look_up(draw(4, 3), jnp.array([3, -1, 4]), None),
            lambda: jnp.take(draw(4, 3), jnp.array([3, -1, 4]), axis=0),
        ),
    ],
)
def test_they_give_the_bits_of_jax(operation, plain):
    np.testing.assert_array_equal(operation(), plain())


def test_a_given_contraction_stays_as_it_is():
    def quantized(*operands, **options):
        raise AssertionError("not called here")

    assert operations.contraction(quantized) is quantized
    assert operations.contraction(jax.lax.dot_general) is operations.dot_general


@pytest.mark.parametrize(
    ("layer", "inputs"),
    [
        (nnx.Linear(3, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 3))),
        (nnx.LinearGeneral(3, (4, 5), rngs=nnx.Rngs(0)), jnp.ones((2, 3))),
        (nnx.Embed(3, 4, rngs=nnx.Rngs(0)), jnp.array([0, 1])),
        (nnx.LayerNorm(3, rngs=nnx.Rngs(0)), jnp.ones((2, 3))),
        (nnx.RMSNorm(3, rngs=nnx.Rngs(0)), jnp.ones((2, 3))),
    ],
    ids=lambda x: type(x).__name__,
)
def test_layers_call_no_functions_in_their_programs(layer, inputs):
    program = jax.jit(lambda inputs: layer(inputs)).lower(inputs).as_text()
    assert "call @" not in program
