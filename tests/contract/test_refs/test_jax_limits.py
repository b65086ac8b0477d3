"""What JAX forbids for refs, said with the paths of our objects (section 12.1)."""

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from tests.zoo import Box

RETURNED = "mutable array references cannot be returned"


def block(value=1.0):
    return Box(bn=nnx.Dict(bias=nnx.Param(jnp.array(value), ref=True)))


@pytest.mark.parametrize(
    "transform",
    [
        jax.jit,
        lambda f: lambda: jax.eval_shape(f),
        lambda f: lambda: jax.lax.cond(True, f, f),
        lambda f: lambda: jax.lax.scan(lambda c, _: (c, f()), 0, None, length=2),
    ],
    ids=["jit", "eval_shape", "cond", "scan"],
)
def test_returning_a_new_ref_is_an_error(transform):
    with pytest.raises(ValueError, match=RETURNED):
        transform(block)()


def test_returning_a_ref_that_came_in_is_an_error():
    with pytest.raises(ValueError, match=RETURNED):
        jax.jit(lambda model: model)(block())


def test_passing_what_is_closed_over_is_an_error():
    captured = block()

    @jax.jit
    def f(argument):
        return argument.bn.bias[...] + captured.bn.bias[...]

    with pytest.raises(ValueError, match="was both closed over and passed"):
        f(captured)


def test_a_ref_can_not_be_differentiated():
    # A TypeError since JAX 0.12.
    with pytest.raises((TypeError, ValueError)):
        jax.grad(lambda model: model.bn.bias[...])(block())


def test_a_ref_may_be_beside_what_is_differentiated():
    model, count = nnx.Param(jnp.array(3.0)), nnx.Variable(jnp.array(0), ref=True)

    def loss(model, count):
        count[...] += 1
        return model[...] ** 2

    assert jax.grad(loss)(model, count)[...] == 6.0
    assert count[...] == 1


def test_a_ref_as_carry_of_scan_is_an_error():
    with pytest.raises(ValueError, match="mutable array reference"):
        jax.lax.scan(lambda carry, _: (carry, None), block(), None, length=2)


def test_refs_are_scanned_along_their_first_axis():
    stack = nnx.Dict(w=nnx.Param(jnp.arange(3.0), ref=True))

    def body(carry, layer):
        layer.w[...] *= 2
        return carry + layer.w[...], None

    assert jax.lax.scan(body, 0.0, stack)[0] == 6.0
    assert stack.w[...].tolist() == [0.0, 2.0, 4.0]


def test_a_ref_is_no_array():
    ref = block().bn.bias.get_raw_value()
    with pytest.raises(TypeError):
        jnp.sin(ref)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (jnp.ones(3), "Invalid shape for `swap`"),
        (jnp.array([1, 2]), "Invalid dtype for `swap`"),
    ],
)
def test_writing_another_shape_or_dtype_into_a_bare_ref_is_an_error(value, message):
    """A Variable takes what arrays take: see test_writes.py."""
    ref = nnx.Param(jnp.ones(2), ref=True).get_raw_value()
    with pytest.raises(ValueError, match=message):
        ref[...] = value
    assert ref[...].tolist() == [1.0, 1.0]


def test_a_batched_write_to_an_unbatched_ref_is_an_error():
    count = nnx.Variable(jnp.array(0.0), ref=True)

    def f(x):
        count[...] = x

    with pytest.raises(Exception, match="batched"):
        jax.vmap(f)(jnp.arange(3.0))


@pytest.mark.parametrize(
    "call",
    [
        lambda f: jax.jit(f)(),
        lambda f: jax.lax.scan(lambda c, _: (f(), None)[1] or (c, None), 0, length=1),
        lambda f: jax.lax.while_loop(lambda i: i < 1, lambda i: f() or i + 1, 0),
    ],
    ids=["jit", "scan", "while"],
)
def test_what_is_closed_over_is_read_and_written(call):
    model = block(1.0)

    def double():
        model.bn.bias[...] *= 2

    call(double)
    assert model.bn.bias[...] == 2.0
