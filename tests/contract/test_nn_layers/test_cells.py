"""Recurrent cells, by their formulas: steps, first carries, options, errors, dtypes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import random_arrays, tables


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def product(layer, x):
    """What a Linear computes."""
    y = x @ np.float64(layer.kernel[...])
    return y if layer.bias is None else y + np.float64(layer.bias[...])


def lstm(cell, carry, x):
    c, h = carry
    i, f, g, o = (
        product(getattr(cell, a), x) + product(getattr(cell, b), h)
        for a, b in [("ii", "hi"), ("if_", "hf"), ("ig", "hg"), ("io", "ho")]
    )
    return remember(c, i, f, g, o)


def optimized_lstm(cell, carry, x):
    c, h = carry
    total = product(cell.dense_i, x) + product(cell.dense_h, h)
    return remember(c, *np.split(total, 4, axis=-1))


def remember(c, i, f, g, o):
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    h = sigmoid(o) * np.tanh(c)
    return (c, h), h


def simple(cell, h, x):
    total = product(cell.dense_i, x) + product(cell.dense_h, h)
    h = np.tanh(total + h if cell.residual else total)
    return h, h


def gru(cell, h, x):
    w, u = product(cell.dense_i, x), product(cell.dense_h, h)
    (w_r, w_z, w_n), (u_r, u_z, u_n) = np.split(w, 3, -1), np.split(u, 3, -1)
    r, z = sigmoid(w_r + u_r), sigmoid(w_z + u_z)
    h = (1 - z) * np.tanh(w_n + r * u_n) + z * h
    return h, h


STEPS = {
    "LSTMCell": lstm,
    "OptimizedLSTMCell": optimized_lstm,
    "SimpleCell": simple,
    "GRUCell": gru,
}


def scan(cell, carry, xs):
    """The last carry and the outputs of a batch ``[batch, time, features]``."""
    step, outputs = STEPS[type(cell).__name__], []
    for x in np.moveaxis(np.float64(xs), 1, 0):
        carry, y = step(cell, carry, x)
        outputs.append(y)
    return carry, np.stack(outputs, 1)


def make(name="GRUCell", **options):
    return nnx.RNN(getattr(nnx, name)(2, 3, rngs=nnx.Rngs(0)), **options)


normal = functools.partial(random_arrays.random, seed=1)


class Sum(nnx.Module):
    """Sums up to the present step; the carry is a pytree with batch axes first."""

    num_feature_axes = 1

    def __call__(self, carry, x):
        total = carry["total"] + x
        return {"total": total, "count": carry["count"] + 1}, total

    def initialize_carry(self, input_shape, rngs=None):
        return {"total": jnp.zeros(input_shape), "count": jnp.zeros(input_shape[:-1])}


SEQUENCE = jnp.array([[1.0, 2.0, 3.0, 10.0], [4.0, 20.0, 30.0, 40.0]])[..., None]


CELLS = tuple(STEPS)
TWO_STATES = ("LSTMCell", "OptimizedLSTMCell")
every_cell = pytest.mark.parametrize("name", CELLS)


def new(name, **options):
    return getattr(nnx, name)(2, 3, rngs=nnx.Rngs(0), **options)


def carry_of(name, *batch, seed=2):
    states = tuple(normal(*batch, 3, seed=seed + n) for n in range(2))
    return states if name in TWO_STATES else states[0]


@jax.jit
def step(cell, carry, x):
    return cell(carry, x)


def numbers(tree):
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]


def double(name, **options):
    """A cell in double precision, a batch of sequences and a first carry."""
    options |= {"dtype": np.float64, "bias_init": nnx.initializers.normal()}
    with jax.enable_x64(False):  # the initializers need not be compiled again
        cell = new(name, **options)
    for variable in jax.tree.leaves(cell, is_leaf=lambda x: isinstance(x, nnx.Param)):
        variable.set_value(jnp.float64(variable[...]))
    x = normal(2, 4, 2, dtype=jnp.float64)
    return cell, x, jax.tree.map(np.float64, carry_of(name, 2))


@tables.cases(
    "name, options", *((name, {}) for name in CELLS), ("SimpleCell", {"residual": True})
)
def test_each_step_is_the_formula_of_the_paper(name, options, float64):
    cell, x, carry = double(name, **options)
    rnn = nnx.RNN(cell, return_carry=True)
    got = nnx.jit(lambda rnn, x, carry: rnn(x, initial_carry=carry))(rnn, x, carry)
    expected = scan(cell, carry, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


GATES = {"LSTMCell": 3, "OptimizedLSTMCell": 3, "GRUCell": 2, "SimpleCell": 0}


@every_cell
def test_gates_and_activations_may_be_replaced(name):
    calls = []

    def recorded(label):
        return lambda x: calls.append(label) or x

    gate = {"gate_fn": recorded("gate")} if GATES[name] else {}
    new(name, activation_fn=recorded("act"), **gate)(carry_of(name, 1), normal(1, 2))
    count = 2 if name in TWO_STATES else 1
    assert sorted(calls) == ["act"] * count + ["gate"] * GATES[name]


@every_cell
def test_the_first_carry_is_zeros_and_draws_a_key_for_each_array(name):
    rngs = nnx.Rngs(0, carry=1)
    carry = new(name).initialize_carry((4, 5, 2), rngs)
    count = 2 if name in TWO_STATES else 1
    assert isinstance(carry, tuple) == (count == 2)
    assert [x.shape for x in jax.tree.leaves(carry)] == [(4, 5, 3)] * count
    assert not any(np.any(x) for x in numbers(carry))
    assert (rngs.carry.count[...], rngs.default.count[...]) == (count, 0)


@every_cell
def test_the_first_carry_may_have_an_initializer(name):
    cell, init = new(name), nnx.initializers.normal()
    carry = cell.initialize_carry((4, 2), nnx.Rngs(carry=7), init)
    for n, x in enumerate(jax.tree.leaves(carry)):
        key = jax.random.fold_in(jax.random.key(7), n)
        np.testing.assert_array_equal(x, init(key, (4, 3), jnp.float32))
    again = cell.initialize_carry((4, 2), nnx.RngStream(7, tag="any"), carry_init=init)
    np.testing.assert_array_equal(numbers(again), numbers(carry))


@every_cell
def test_rngs_must_be_provided_also_for_zeros(name):
    with pytest.raises(ValueError, match=f"(?s)RNGs must be provided.*at {name}"):
        new(name).initialize_carry((4, 2))
    with pytest.raises(TypeError, match="rngs must be a Rngs, RngStream or None"):
        new(name).initialize_carry((4, 2), 0)
    with pytest.raises(AttributeError, match="No RngStream named 'carry'"):
        new(name).initialize_carry((4, 2), nnx.Rngs(params=0))


@every_cell
def test_older_arguments_warn_and_work(name):
    ones = nnx.initializers.ones
    with pytest.warns(UserWarning, match="carry_init is provided in __init__") as found:
        cell = new(name, carry_init=ones)
    assert found[0].filename == __file__
    assert cell.carry_init is ones and cell.rngs is None
    rngs = nnx.Rngs(0)
    assert all((x == 1).all() for x in numbers(cell.initialize_carry((2,), rngs)))
    zeros = cell.initialize_carry((2,), rngs, nnx.initializers.zeros)
    assert not any(x.any() for x in numbers(zeros))
    rngs = nnx.Rngs(0, carry=3)
    with pytest.warns(UserWarning, match="keep_rngs argument is deprecated"):
        cell = getattr(nnx, name)(2, 3, keep_rngs=True, rngs=rngs)
    assert cell.rngs.tag == "carry" and rngs.carry.count[...] == 1
    cell.initialize_carry((4, 2))
    assert cell.rngs.count[...] == (2 if name in TWO_STATES else 1)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_modified_orthogonal_is_drawn_in_the_default_dtype(dtype):
    key, jax_init = jax.random.key(0), jax.nn.initializers.orthogonal()
    for is_wide, default in ((False, jnp.float32), (True, jnp.float64)):
        with jax.enable_x64(is_wide):
            expected = jax_init(key, (3, 3), default).astype(dtype)
            got = nnx.nn.recurrent.modified_orthogonal(key, (3, 3), dtype)
            assert got.dtype == dtype
            np.testing.assert_array_equal(got, expected)


@every_cell
def test_metadata_goes_to_the_kernels_it_is_meant_for(name):
    cell = new(
        name,
        kernel_metadata={"tag": "input"},
        recurrent_kernel_metadata={"tag": "hidden"},
        bias_metadata={"tag": "bias"},
    )
    for path, param in nnx.to_flat_state(nnx.state(cell)):
        is_input = path[0] in ("ii", "if_", "ig", "io", "dense_i")
        expected = "input" if is_input else "hidden"
        assert param.tag == ("bias" if path[1] == "bias" else expected), path


@every_cell
def test_inputs_and_carries_that_do_not_fit_name_the_cell(name):
    cell, x, one, is_pair = new(name), normal(4, 2), normal(4, 3), name in TWO_STATES

    def refuses(carry, x, error, phrase):
        with pytest.raises(error, match=phrase) as caught:
            cell(carry, x)
        return "".join([str(caught.value), *caught.value.__notes__])

    for shape in [(4, 5), (), (2, 4, 1)]:
        phrase = "contracting dimensions" if shape else "number of axes"
        phrase = f"{phrase}(.|\n)*at {name}"
        told = refuses(carry_of(name, 4), jnp.ones(shape), TypeError, phrase)
        assert f"inputs: {jax.typeof(jnp.ones(shape))}" in told
    wanted = "a tuple of 2 arrays" if is_pair else "one array"
    pairs = [one, (one,), (one,) * 3, {"c": one, "h": one}, None]
    for carry in pairs if is_pair else [(one, one), [one], {"h": one}, None]:
        refuses(carry, x, ValueError, f"{name} expects {wanted}")
    for shape in [(4, 2), (4, 1), (2, 4, 1)]:
        carry = (normal(*shape), one) if is_pair else normal(*shape)
        phrase = f"{name} expects a carry.*s=3"
        assert str(shape) in refuses(carry, x, TypeError, phrase)
    refuses(carry_of(name, 3), x, TypeError, f"(?s)broadcasting.*at {name}\n  carry: ")


@pytest.mark.any_arguments
@pytest.mark.parametrize("name", TWO_STATES)
def test_an_array_with_an_axis_for_the_states_is_a_carry(name):
    cell, carry, x = new(name), jnp.ones((2, 4, 3)), jnp.ones((4, 2))
    np.testing.assert_array_equal(cell(carry, x)[1], cell(tuple(carry), x)[1])
    with pytest.raises(ValueError, match="a tuple of 2 arrays"):
        cell(jnp.ones((2, 3)), jnp.ones((2, 2)))


@pytest.mark.any_arguments
@every_cell
def test_a_carry_may_be_broadcast_along_the_batch(name):
    small = carry_of(name, 1)
    big = jax.tree.map(lambda x: jnp.broadcast_to(x, (4, 3)), small)
    cell, x = new(name), normal(4, 2)
    _, expected = step(cell, big, x)
    np.testing.assert_allclose(step(cell, small, x)[1], expected, rtol=1e-6, atol=1e-7)


def test_the_members_of_the_base_class_are_for_subclasses():
    base = nnx.RNNCellBase()
    for member in (
        lambda: base(1, 2),
        lambda: base.initialize_carry((2,), nnx.Rngs(0)),
        lambda: base.num_feature_axes,
    ):
        with pytest.raises(NotImplementedError):
            member()
    assert all(new(name).num_feature_axes == 1 for name in CELLS)
    assert all(isinstance(new(name), nnx.RNNCellBase) for name in CELLS)
