"""A ref-backed Variable takes what an array-backed one takes: values and indices.

JAX's refs take less than arrays, and write elsewhere where an index is out of bounds.
What JAX forbids for refs is said with the paths of our objects (section 12.1).
"""

import warnings

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st

import graftree as nnx
from tests import strategies
from tests.zoo import Box

SHAPE = (2, 3)
DTYPES = [jnp.float32, jnp.int32, jnp.bool_, jnp.bfloat16, jnp.complex64]

INDICES = [
    ..., (), 0, -1, 5, -7, (0, 1), (0, -1), (..., 0), (0, ...), (..., ...), (0, 1, 2),
    slice(None), slice(1, None), slice(-1, None), slice(0, 9), slice(5, 9), slice(1, 0),
    slice(None, None, 2), slice(None, None, -1), (slice(None), 0), (slice(None), 7),
    (slice(None), slice(1, 3)), np.int32(1), jnp.array(1), jnp.array(7), jnp.array(-1),
    np.array([0, 1]), jnp.array([1, 1]), jnp.array([0, 5]), (np.array([0, 1]), 0), [0],
    (0, [0, 1]), (np.array([[0], [1]]), np.array([0, 2])), np.array([], int), True,
    None, (None, 0), np.array([True, False]), (slice(None), np.arange(3) < 2), "a",
    1.5, slice(0.5, None), slice(None, None, 0),
    (0, slice(None, None, 2)), (slice(0, 1, 2), 1),
]  # fmt: skip

VALUES = [
    1, 2.5, True, 1j, -0.0, np.float64(3), np.int8(4), [5.0, 6.0, 7.0], "text", None,
    np.arange(3), np.ones(SHAPE), jnp.arange(3.0), jnp.ones(SHAPE),
    jnp.ones((1, 3), int), jnp.ones((2, 1), jnp.bfloat16), jnp.ones(2, bool),
    jnp.ones((5, 2)), jnp.ones(0), jnp.array(2, jnp.complex64),
    nnx.Param(jnp.arange(3)), nnx.Param(1.5, ref=True),
    jax.ShapeDtypeStruct(SHAPE, jnp.float32),
]  # fmt: skip


def outcome(dtype, ref, write):
    """What a write leaves and warns of, or the type of its error."""
    variable = nnx.Param(jnp.arange(6).reshape(SHAPE).astype(dtype), ref=ref)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            write(variable)
        except Exception as error:
            return type(error)
    value = variable[...]
    return value.dtype, value.tolist(), {warning.category for warning in caught}


def assign(index, value):
    def write(variable):
        variable[index] = value

    return write


def in_scan(index, value):
    def write(variable):
        def body(variable, x):
            variable[index] = value

        nnx.scan(body, in_axes=(None, 0), graph_updates=False)(variable, jnp.zeros(2))

    return write


WRITES = st.sampled_from([assign, lambda *args: nnx.jit(assign(*args)), in_scan])


@strategies.examples(60, 150)
@hypothesis.given(
    WRITES, st.sampled_from(DTYPES), st.sampled_from(INDICES), st.sampled_from(VALUES)
)
def test_writes_do_what_they_do_without_a_ref(write, dtype, index, value):
    """Issue 12, §12."""
    write = write(index, value)
    assert outcome(dtype, True, write) == outcome(dtype, False, write)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_reads_give_what_they_give_without_a_ref(index, transform):
    def read(ref):
        variable = nnx.Param(jnp.arange(6.0).reshape(SHAPE), ref=ref)
        try:
            return transform(lambda variable: variable[index])(variable).tolist()
        except Exception as error:
            return type(error)

    assert str(read(True)) == str(read(False))  # what is out of bounds reads as nan


@pytest.mark.parametrize("index", [0, -1, 1, 2, -3])
def test_a_traced_index_writes_where_an_array_is_written(index):
    variable = nnx.Param(jnp.zeros(2), ref=True)

    @jax.jit
    def write(variable, index, value):
        variable[index] = value
        variable[...] *= 2

    write(variable, index, 3)
    assert variable[...].tolist() == (jnp.zeros(2).at[index].set(3) * 2).tolist()


WHOLE = [
    lambda variable, value: variable.set_value(value),
    lambda variable, value: nnx.update([variable], {0: value}),
    lambda variable, value: variable.update_from_state(nnx.Param(value)),
    lambda variable, value: nnx.update(variable, nnx.Param(value)),
]


@pytest.mark.parametrize("write", WHOLE)
@pytest.mark.parametrize("value", [5, 5.0, jnp.array(5), jnp.full(3, 5), np.full(3, 5)])
def test_a_new_value_is_cast_and_a_scalar_fills(write, value):
    """Issue 12, §12: a ref keeps its shape and dtype, so it takes what fits these."""
    variable = nnx.Param(jnp.zeros(3), ref=True)
    ref = variable.get_raw_value()
    write(variable, value)
    assert variable.get_raw_value() is ref
    assert ref.dtype == jnp.float32 and ref[...].tolist() == [5.0, 5.0, 5.0]


@pytest.mark.parametrize("write", WHOLE)
@pytest.mark.parametrize("value", [jnp.ones(1), jnp.ones((1, 3)), jnp.ones(4)])
def test_a_new_value_of_another_shape_is_an_error(write, value):
    variable = nnx.Param(jnp.zeros(3), ref=True)
    with pytest.raises(ValueError, match="Invalid shape"):
        write(variable, value)
    assert variable[...].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("write", WHOLE)
def test_a_cast_that_loses_something_is_told(write):
    variable = nnx.Param(jnp.zeros(3, jnp.int32), ref=True)
    with pytest.raises(FutureWarning, match="cannot safely cast"):
        write(variable, jnp.full(3, 1.5))
    assert variable[...].tolist() == [0, 0, 0]


def test_an_optimizer_updates_refs_of_lower_precision():
    variable = nnx.Param(jnp.ones(2, jnp.bfloat16), ref=True)
    optimizer = nnx.Optimizer(variable, optax.sgd(1.0), wrt=nnx.Param)
    optimizer.update(variable, nnx.Param(jnp.ones(2, jnp.float32)))
    assert variable[...].dtype == jnp.bfloat16
    assert variable[...].tolist() == [0.0, 0.0]


# ------------------------------------------------------------------- what JAX forbids

RETURNED = "mutable array references cannot be returned"


def block(value=1.0):
    return Box(bn=nnx.Dict(bias=nnx.Param(jnp.array(value), ref=True)))


RETURNING = {
    "jit": lambda: jax.jit(block)(),
    "jit of what came in": lambda: jax.jit(lambda model: model)(block()),
    "eval_shape": lambda: jax.eval_shape(block),
    "cond": lambda: jax.lax.cond(True, block, block),
    "scan": lambda: jax.lax.scan(lambda c, _: (c, block()), 0, None, length=2),
}


@pytest.mark.parametrize("call", RETURNING.values(), ids=RETURNING)
def test_returning_a_ref_is_an_error(call):
    with pytest.raises(ValueError, match=RETURNED):
        call()


def test_passing_what_is_closed_over_is_an_error():
    captured = block()
    f = jax.jit(lambda argument: argument.bn.bias[...] + captured.bn.bias[...])
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


def test_writing_another_shape_or_dtype_into_a_bare_ref_is_an_error():
    """A Variable takes what arrays take: see above."""
    ref = nnx.Param(jnp.ones(2), ref=True).get_raw_value()
    for value, name in ((jnp.ones(3), "shape"), (jnp.array([1, 2]), "dtype")):
        with pytest.raises(ValueError, match=f"Invalid {name} for `swap`"):
            ref[...] = value
    assert ref[...].tolist() == [1.0, 1.0]


def test_a_batched_write_to_an_unbatched_ref_is_an_error():
    count = nnx.Variable(jnp.array(0.0), ref=True)

    def f(x):
        count[...] = x

    with pytest.raises(Exception, match="batched"):
        jax.vmap(f)(jnp.arange(3.0))


CLOSURES = {
    "jit": lambda f: jax.jit(f)(),
    "scan": lambda f: jax.lax.scan(lambda c, _: f() or (c, None), 0, length=1),
    "while": lambda f: jax.lax.while_loop(lambda i: i < 1, lambda i: f() or i + 1, 0),
}


@pytest.mark.parametrize("call", CLOSURES.values(), ids=CLOSURES)
def test_what_is_closed_over_is_read_and_written(call):
    model = block(1.0)

    def double():
        model.bn.bias[...] *= 2

    call(double)
    assert model.bn.bias[...] == 2.0
