"""RNN: a loop over the cell, with all of its options; see also the tests of state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from graftree.nn import recurrent
from tests.nn import recurrent_cases
from tests.nn.recurrent_cases import SEQUENCE, make, normal

# ----------------------------------------------------------------- layout and options


@pytest.mark.parametrize(
    ("batch", "time_major"),
    [((), False), ((2, 3), False), ((2, 3), True)],
)
def test_any_number_of_batch_axes_and_both_layouts(batch, time_major):
    rnn, x = make(return_carry=True), normal(*batch, 4, 2)
    flat = jnp.reshape(x, (-1, 4, 2))
    carry, expected = recurrent_cases.scan(rnn.cell, np.zeros((len(flat), 3)), flat)
    axis = 0 if time_major else len(batch)
    last, y = rnn(jnp.moveaxis(x, -2, axis), time_major=time_major)
    y = jnp.moveaxis(y, axis, -2)
    np.testing.assert_allclose(y.reshape(-1, 4, 3), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(last.reshape(-1, 3), carry, rtol=1e-5, atol=1e-6)


LENGTHS = jnp.array([3, 1])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [[1, 3, 6, 16], [4, 24, 54, 94]]),
        ({"reverse": True}, [[10, 13, 15, 16], [40, 70, 90, 94]]),
        (
            {"reverse": True, "keep_order": True},
            [[16, 15, 13, 10], [94, 90, 70, 40]],
        ),
        ({"seq_lengths": LENGTHS}, [[1, 3, 6, 16], [4, 24, 54, 94]]),
        ({"seq_lengths": LENGTHS, "reverse": True}, [[3, 5, 6, 16], [4, 44, 74, 94]]),
        (
            {"seq_lengths": LENGTHS, "reverse": True, "keep_order": True},
            [[6, 5, 3, 16], [4, 94, 74, 44]],
        ),
    ],
)
def test_reversed_sequences_keep_their_padding_at_the_end(options, expected):
    carry, y = nnx.RNN(recurrent_cases.Sum(), return_carry=True)(SEQUENCE, **options)
    np.testing.assert_array_equal(y[..., 0], expected)
    has_lengths = "seq_lengths" in options
    totals, steps = ([6, 4], [3, 1]) if has_lengths else ([16, 94], [4, 4])
    np.testing.assert_array_equal(carry["total"][:, 0], totals)
    np.testing.assert_array_equal(carry["count"], steps)


def test_time_major_sequences_are_reversed_in_the_same_way():
    options = {"seq_lengths": LENGTHS, "reverse": True, "keep_order": True}
    x = SEQUENCE.swapaxes(0, 1)
    carry, y = nnx.RNN(recurrent_cases.Sum(), return_carry=True, time_major=True)(
        x, **options
    )
    np.testing.assert_array_equal(y[..., 0].T, [[6, 5, 3, 16], [4, 94, 74, 44]])
    np.testing.assert_array_equal(carry["total"][:, 0], [6, 4])


@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_the_carry_is_that_after_the_last_valid_step(shape):
    rnn, x = make(name="LSTMCell", return_carry=True), normal(*shape, 4, 2)
    first = tuple(normal(*shape, 3, seed=n) for n in (5, 6))
    lengths = jnp.arange(np.prod(shape, dtype=int)).reshape(shape) % 5
    got, _ = rnn(x, initial_carry=first, seq_lengths=lengths)
    for index in np.ndindex(*shape):
        expected = tuple(np.float64(state[index])[None] for state in first)
        for step in np.float64(x[index])[: int(lengths[index])]:
            expected, _ = recurrent_cases.lstm(rnn.cell, expected, step[None])
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a[index], b[0], rtol=1e-5, atol=1e-6)


def test_a_sequence_of_length_zero_gives_the_first_carry():
    rnn, first = make(return_carry=True), normal(2, 3)
    carry, _ = rnn(normal(2, 4, 2), initial_carry=first, seq_lengths=jnp.array([0, 0]))
    np.testing.assert_array_equal(carry, first)


@pytest.mark.parametrize("lengths", [2, [2], np.array([2, 2], np.uint8)])
def test_lengths_may_be_numbers_lists_and_broadcast(lengths):
    x = SEQUENCE
    carry, _ = nnx.RNN(recurrent_cases.Sum())(x, seq_lengths=lengths, return_carry=True)
    np.testing.assert_array_equal(carry["total"][:, 0], [3, 24])


def test_arguments_of_the_call_override_attributes_also_by_false():
    x = SEQUENCE.swapaxes(0, 1)
    rnn = nnx.RNN(
        recurrent_cases.Sum(),
        time_major=True,
        return_carry=True,
        reverse=True,
        keep_order=True,
    )
    options = ("time_major", "return_carry", "reverse", "keep_order")
    y = rnn(SEQUENCE, **dict.fromkeys(options, False))
    np.testing.assert_array_equal(y[0, :, 0], [1, 3, 6, 16])
    _, y = rnn(x)
    np.testing.assert_array_equal(y[:, 0, 0], [16, 15, 13, 10])


def test_unrolling_changes_nothing_but_the_program():
    x = normal(2, 4, 2)
    np.testing.assert_allclose(make(unroll=3)(x), make()(x), rtol=1e-6, atol=1e-7)
    for unroll, steps in ((3, 3), (1, 1), (True, 4)):
        text = str(jax.make_jaxpr(lambda m, x: m(x))(make(unroll=unroll), x))
        assert f"unroll={steps}\n" in text


@pytest.mark.parametrize("time_major", [False, True])
@pytest.mark.parametrize("batch", [(), (2, 1)])
def test_flip_sequences(time_major, batch):
    x = jnp.broadcast_to(jnp.array([1, 2, 3, 8, 9])[:, None], (*batch, 5, 1))
    axis = 0 if time_major else len(batch)
    backwards = [9, 8, 3, 2, 1]
    for length, expected in [(None, backwards), (3, [3, 2, 1, 9, 8]), (0, backwards)]:
        lengths = None if length is None else jnp.full(batch, length)
        y = recurrent.flip_sequences(
            jnp.moveaxis(x, -2, axis), lengths, len(batch), time_major
        )
        y = np.moveaxis(y, axis, -2)[..., 0]
        np.testing.assert_array_equal(y, np.broadcast_to(expected, (*batch, 5)))


# ------------------------------------------------------------------- dtypes and errors


@pytest.mark.parametrize(
    ("name", "option", "given"),
    [
        ("LSTMCell", "param_dtype", jnp.float32),
        ("GRUCell", "param_dtype", jnp.bfloat16),
        ("SimpleCell", "param_dtype", jnp.bfloat16),
        ("SimpleCell", "dtype", jnp.float32),
    ],
)
def test_the_carry_is_as_wide_as_what_the_steps_return(name, option, given):
    cell = getattr(nnx, name)(2, 3, rngs=nnx.Rngs(0), **{option: jnp.bfloat16})
    x = normal(1, 3, 2).astype(given)
    carry, expected = cell.initialize_carry((1, 2), nnx.Rngs(0)), []
    for t in range(3):
        carry, y = jax.jit(lambda cell, h, x: cell(h, x))(cell, carry, x[:, t])
        expected.append(y)
    last, y = nnx.RNN(cell, return_carry=True)(x, seq_lengths=3)
    assert y.dtype == expected[-1].dtype
    np.testing.assert_allclose(
        np.float32(y), np.float32(np.stack(expected, 1)), rtol=1e-2, atol=1e-2
    )
    for a, b in zip(jax.tree.leaves(last), jax.tree.leaves(carry), strict=True):
        assert jnp.promote_types(a.dtype, b.dtype) == a.dtype


@pytest.mark.parametrize(
    ("shape", "options", "error", "phrases"),
    [
        (
            (2, 4, 5),
            {},
            TypeError,
            ["contracting dimensions", "at RNN.cell.dense_i", "inputs: float32[2, 5]"],
        ),
        ((2,), {}, ValueError, ["nnx.RNN expects inputs [*batch, time", "float32[2]"]),
        (
            (2, 4, 2),
            {"seq_lengths": [1, 2, 3]},
            ValueError,
            ["broadcasting", "int32[3]", "int32[2]"],
        ),
        ((2, 4, 2), {"seq_lengths": 1.5}, ValueError, ["must be integers", "float32"]),
        (
            (2, 4, 2),
            {"initial_carry": (1, 2)},
            ValueError,
            ["GRUCell expects one array as carry"],
        ),
        (
            (2, 4, 2),
            {"initial_carry": jnp.ones((1, 3))},
            TypeError,
            ["carry input and carry output", "float32[1,3]", "float32[2,3]"],
        ),
        (
            (2, 4, 2),
            {"initial_carry": jnp.ones((2, 4))},
            TypeError,
            ["GRUCell expects a carry", "hidden_features=3", "(2, 4)"],
        ),
        ((2, 4, 2), {"rngs": 0}, TypeError, ["rngs must be a Rngs, RngStream or None"]),
    ],
)
def test_wrong_arguments_are_named_and_change_nothing(shape, options, error, phrases):
    rnn = make()
    with pytest.raises(error) as caught:
        rnn(jnp.ones(shape), **options)
    told = "\n".join([str(caught.value), *caught.value.__notes__])
    assert all(phrase in told for phrase in phrases), told
    assert rnn.rngs.count[...] == 0


# ---------------------------------------------------------------------------- the peer


@pytest.mark.peers
@pytest.mark.parametrize(("time_major", "lengths"), [(False, [3, 1]), (True, None)])
def test_all_options_give_what_the_peer_gives(peer, time_major, lengths):
    ours, theirs = make(), make(peer)
    x = normal(4, 2, 2) if time_major else normal(2, 4, 2)
    lengths = None if lengths is None else jnp.array(lengths)
    for reverse, keep in [(False, True), (True, False), (True, True)]:
        options = {"reverse": reverse, "keep_order": keep, "time_major": time_major}
        options |= {"seq_lengths": lengths, "return_carry": True}
        got, expected = ours(x, **options), theirs(x, **options)
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert ours.rngs.count[...] == theirs.rngs.count[...]
