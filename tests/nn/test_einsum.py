"""Einsum against NumPy: above all, along which axes the bias varies."""

import numpy as np
import pytest

import graftree as nnx
from tests.programs import in_one_program
from tests.random_arrays import initializer, random


def make(*args, **options):
    inits = {"kernel_init": initializer, "bias_init": initializer}
    return nnx.Einsum(*args, **inits, **options, rngs=nnx.Rngs(0))


CASES = [
    ("ab,bc->ac", (2, 3), (3, 4), (4,), (1, 4)),
    ("ab,bc->ca", (2, 3), (3, 4), (4,), (4, 1)),
    ("a b, b c -> a c", (2, 3), (3, 4), 4, (1, 4)),
    ("nta,hab->nthb", (2, 5, 3), (6, 3, 4), (6, 4), (1, 1, 6, 4)),
    ("nta,hab->nbht", (2, 5, 3), (6, 3, 4), (4, 6), (1, 4, 6, 1)),
    ("hab,ha->hb", (6, 3, 4), (6, 3), (6,), (6, 1)),
    ("...b,bc->...c", (2, 5, 3), (3, 4), (4,), (1, 1, 4)),
    ("...b,bc->c...", (2, 5, 3), (3, 4), (4,), (4, 1, 1)),
    ("d...ab,bc...->ad...c", (7, 5, 2, 3), (3, 4, 5), (5, 4), (1, 1, 5, 4)),
    ("...b,...bc->...c", (2, 5, 3), (5, 3, 4), (5, 4), (1, 5, 4)),
]


@pytest.mark.parametrize(("equation", "shape", "kernel", "bias", "spread"), CASES)
def test_bias_varies_along_the_letters_of_the_kernel(
    equation, shape, kernel, bias, spread
):
    layer = make(equation, kernel, bias)
    x = random(*shape)
    expected = np.einsum(equation, np.float64(x), np.float64(layer.kernel[...]))
    expected = expected + np.float64(layer.bias[...]).reshape(spread)
    np.testing.assert_allclose(in_one_program(layer, x), expected, rtol=1e-5, atol=1e-6)


def test_equation_is_kept_without_spaces():
    assert make("a b , b c -> a c", (3, 4)).einsum_str == "ab,bc->ac"


def test_without_bias_shape_there_is_no_bias():
    layer = make("ab,bc->ac", (3, 4))
    assert layer.bias is None
    x = random(2, 3)
    np.testing.assert_allclose(layer(x), x @ layer.kernel[...], rtol=1e-5)


def test_call_may_give_the_equation():
    layer = make("ab,bc->ac", (3, 4), 4)
    x = random(2, 3)
    np.testing.assert_allclose(layer(x, "ab,bc->c a"), layer(x).T, rtol=1e-6)
    later = make(None, (3, 4), 4)
    np.testing.assert_array_equal(later(x, "ab,bc->ac"), layer(x))


def test_equation_must_come_from_somewhere():
    message = "No `einsum_str` argument was provided"
    with pytest.raises(ValueError, match=message):
        make(None, (3, 4))(random(2, 3))


@pytest.mark.parametrize(
    ("equation", "message"),
    [
        ("ab,bc", 'must be explicit and include "->"'),
        ("ab->a", "exactly two operands.*instead of 0"),
        ("ab,bc,cd->ad", "exactly two operands.*instead of 2"),
    ],
)
def test_equations_of_another_form_are_refused(equation, message):
    with pytest.raises(ValueError, match=message):
        make(equation, (3, 4))
    with pytest.raises(ValueError, match=message):
        make("ab,bc->ac", (3, 4))(random(2, 3), equation)


@pytest.mark.peers
@pytest.mark.parametrize(("equation", "shape", "kernel", "bias", "spread"), CASES)
def test_einsum_equals_the_peer(peer, equation, shape, kernel, bias, spread):
    options = {"bias_init": nnx.initializers.normal()}
    ours = nnx.Einsum(equation, kernel, bias, **options, rngs=nnx.Rngs(0))
    theirs = peer.Einsum(equation, kernel, bias, **options, rngs=peer.Rngs(0))
    np.testing.assert_array_equal(ours.kernel[...], theirs.kernel[...])
    x = random(*shape)
    np.testing.assert_allclose(ours(x), theirs(x), rtol=1e-5, atol=1e-6)
