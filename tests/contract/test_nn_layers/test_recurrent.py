"""RNN and Bidirectional: a loop over the cell, options, keys, state, and transforms."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import random_arrays, tables
from tests.comparisons import raises
from tests.contract.test_nn_layers import test_cells as cells
from tests.contract.test_nn_layers.test_cells import SEQUENCE, Sum, make, normal

# ----------------------------------------------------------------- layout and options


@tables.cases("batch, time_major", ((), False), ((2, 3), False), ((2, 3), True))
def test_any_number_of_batch_axes_and_both_layouts(batch, time_major):
    rnn, x = make(return_carry=True), normal(*batch, 4, 2)
    flat = jnp.reshape(x, (-1, 4, 2))
    carry, expected = cells.scan(rnn.cell, np.zeros((len(flat), 3)), flat)
    axis = 0 if time_major else len(batch)
    last, y = rnn(jnp.moveaxis(x, -2, axis), time_major=time_major)
    y = jnp.moveaxis(y, axis, -2)
    np.testing.assert_allclose(y.reshape(-1, 4, 3), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(last.reshape(-1, 3), carry, rtol=1e-5, atol=1e-6)


LENGTHS = jnp.array([3, 1])


@tables.cases(
    "options, expected",
    ({}, [[1, 3, 6, 16], [4, 24, 54, 94]]),
    ({"reverse": True}, [[10, 13, 15, 16], [40, 70, 90, 94]]),
    ({"reverse": True, "keep_order": True}, [[16, 15, 13, 10], [94, 90, 70, 40]]),
    ({"seq_lengths": LENGTHS}, [[1, 3, 6, 16], [4, 24, 54, 94]]),
    ({"seq_lengths": LENGTHS, "reverse": True}, [[3, 5, 6, 16], [4, 44, 74, 94]]),
    (
        {"seq_lengths": LENGTHS, "reverse": True, "keep_order": True},
        [[6, 5, 3, 16], [4, 94, 74, 44]],
    ),
)
@pytest.mark.parametrize("time_major", [False, True])
def test_reversed_sequences_keep_padding_at_the_end(options, expected, time_major):
    rnn = nnx.RNN(Sum(), return_carry=True, time_major=time_major)
    carry, y = rnn(SEQUENCE.swapaxes(0, 1) if time_major else SEQUENCE, **options)
    y = y.swapaxes(0, 1) if time_major else y
    np.testing.assert_array_equal(y[..., 0], expected)
    has_lengths = "seq_lengths" in options
    totals, steps = ([6, 4], [3, 1]) if has_lengths else ([16, 94], [4, 4])
    np.testing.assert_array_equal(carry["total"][:, 0], totals)
    np.testing.assert_array_equal(carry["count"], steps)


@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_the_carry_is_that_after_the_last_valid_step(shape):
    rnn, x = make(name="LSTMCell", return_carry=True), normal(*shape, 4, 2)
    first = tuple(normal(*shape, 3, seed=n) for n in (5, 6))
    lengths = jnp.arange(np.prod(shape, dtype=int)).reshape(shape) % 5
    got, _ = rnn(x, initial_carry=first, seq_lengths=lengths)
    for index in np.ndindex(*shape):
        expected = tuple(np.float64(state[index])[None] for state in first)
        for step in np.float64(x[index])[: int(lengths[index])]:
            expected, _ = cells.lstm(rnn.cell, expected, step[None])
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a[index], b[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lengths", [2, [2], np.array([2, 2], np.uint8)])
def test_lengths_may_be_numbers_lists_and_broadcast(lengths):
    carry, _ = nnx.RNN(Sum())(SEQUENCE, seq_lengths=lengths, return_carry=True)
    np.testing.assert_array_equal(carry["total"][:, 0], [3, 24])


def test_arguments_of_the_call_override_attributes_also_by_false():
    options = "time_major", "return_carry", "reverse", "keep_order"
    rnn = nnx.RNN(Sum(), **dict.fromkeys(options, True))
    y = rnn(SEQUENCE, **dict.fromkeys(options, False))
    np.testing.assert_array_equal(y[0, :, 0], [1, 3, 6, 16])
    _, y = rnn(SEQUENCE.swapaxes(0, 1))
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
        y = nnx.nn.recurrent.flip_sequences(
            jnp.moveaxis(x, -2, axis), lengths, len(batch), time_major
        )
        y = np.moveaxis(y, axis, -2)[..., 0]
        np.testing.assert_array_equal(y, np.broadcast_to(expected, (*batch, 5)))


# ------------------------------------------------------------------- dtypes and errors


@tables.cases(
    "name, option, given",
    ("LSTMCell", "param_dtype", jnp.float32),
    ("GRUCell", "param_dtype", jnp.bfloat16),
    ("SimpleCell", "param_dtype", jnp.bfloat16),
    ("SimpleCell", "dtype", jnp.float32),
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
    of_no_steps = nnx.RNN(cell, return_carry=True)(x[:, :0])
    dtypes = jax.tree.map(jnp.result_type, (of_no_steps, (last, y)))
    assert dtypes[0] == dtypes[1]
    y, expected = np.float32(y), np.float32(np.stack(expected, 1))
    np.testing.assert_allclose(y, expected, rtol=1e-2, atol=1e-2)
    for a, b in zip(jax.tree.leaves(last), jax.tree.leaves(carry), strict=True):
        assert jnp.promote_types(a.dtype, b.dtype) == a.dtype


OTHER_BATCH = {"initial_carry": jnp.ones((1, 3))}
WIDE = {"initial_carry": jnp.ones((2, 4))}
THREE = {"seq_lengths": [1, 2, 3]}


@tables.cases(
    "shape, options, error, phrases",
    ((2, 4, 5), {}, TypeError, "contracting dimensions; at RNN.cell.dense_i"),
    ((2, 4, 5), {}, TypeError, "inputs: float32[2,5]"),
    ((2,), {}, ValueError, "nnx.RNN expects inputs [*batch, time; float32[2]"),
    ((2, 4, 2), THREE, ValueError, "broadcasting; int32[3]; int32[2]"),
    ((2, 4, 2), {"seq_lengths": 1.5}, ValueError, "must be integers; float32"),
    ((2, 4, 2), {"initial_carry": (1, 2)}, ValueError, "one array as carry"),
    ((2, 4, 2), OTHER_BATCH, TypeError, "carry input and carry output"),
    ((2, 4, 2), OTHER_BATCH, TypeError, "float32[1,3]; float32[2,3]"),
    ((2, 4, 2), WIDE, TypeError, "GRUCell expects a carry; hidden_features=3"),
    ((2, 4, 2), WIDE, TypeError, "(2, 4)"),
    ((2, 4, 2), {"rngs": 0}, TypeError, "rngs must be a Rngs, RngStream or None"),
)
def test_wrong_arguments_are_named_and_change_nothing(shape, options, error, phrases):
    rnn = make()
    with raises(error, *phrases.split("; ")):
        rnn(jnp.ones(shape), **options)
    assert rnn.rngs.count[...] == 0


class Noisy(nnx.Module):
    """A cell that draws a key and counts in each step."""

    num_feature_axes = 1

    def __init__(self, rngs):
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.steps = nnx.BatchStat(jnp.array(0))

    def __call__(self, carry, x):
        self.steps[...] += 1
        carry = carry + self.dropout(x)
        return carry, carry

    def initialize_carry(self, input_shape, rngs=None):
        return jnp.zeros(input_shape)


def counts(rnn):
    dropout = rnn.cell.dropout.rngs.count
    return [int(x[...]) for x in (dropout, rnn.cell.steps, rnn.rngs.count)]


# ----------------------------------------------------------------------- random keys


def test_rngs_are_made_forked_or_left_out():
    assert (make().rngs.tag, make().rngs.key[...]) == ("carry", jax.random.key(0))
    stream = make(rngs=nnx.RngStream(5, tag="any")).rngs
    assert stream.key[...] == jax.random.fold_in(jax.random.key(5), 0)
    assert make(rngs=False).rngs is None
    for wrong in (0, None, jax.random.key(0)):
        with pytest.raises(ValueError, match="Expected rngs to be"):
            make(rngs=wrong)


def test_absent_rngs_may_be_assigned_later():
    rnn = make(rngs=False)
    with pytest.raises(ValueError, match="RNGs must be provided"):
        rnn(normal(1, 4, 2))
    rnn.rngs = nnx.RngStream(0, tag="carry")
    rnn(normal(1, 4, 2))
    assert rnn.rngs.count[...] == 1


@pytest.mark.parametrize(("name", "draws"), [("LSTMCell", 2), ("GRUCell", 1)])
def test_keys_of_the_first_carry_are_counted(name, draws):
    rnn, x, rngs = make(name=name), normal(1, 4, 2), nnx.Rngs(carry=0)
    rnn(x)
    assert rnn.rngs.count[...] == draws
    rnn(x, rngs=rngs)
    assert (rnn.rngs.count[...], rngs.carry.count[...]) == (draws, 1)
    rnn(x, rngs=rngs.carry)
    assert rngs.carry.count[...] == 1 + draws
    rnn(x, rngs=rngs, initial_carry=rnn.cell.initialize_carry((1, 2), nnx.Rngs(0)))
    assert (rnn.rngs.count[...], rngs.carry.count[...]) == (draws, 2 + draws)


def cell_that_draws():
    """A cell whose first carry is random."""
    init = nnx.initializers.normal()
    with pytest.warns(UserWarning, match="carry_init"):
        return nnx.GRUCell(2, 3, carry_init=init, rngs=nnx.Rngs(0))


def test_the_first_carry_gets_the_keys_of_the_network():
    init = nnx.initializers.normal()
    rnn, x = nnx.RNN(cell_that_draws()), normal(1, 4, 2)
    for n in range(2):
        key = jax.random.fold_in(jax.random.key(0), n)
        expected = rnn(x, initial_carry=init(key, (1, 3), jnp.float32))
        np.testing.assert_array_equal(rnn(x), expected)


def test_cell_state_goes_from_step_to_step(mode):
    rnn, x = nnx.RNN(Noisy(nnx.Rngs(0))), jnp.ones((1, 4, 8))
    y = nnx.jit(lambda rnn, x: rnn(x), **mode)(rnn, x)
    assert counts(rnn) == [4, 4, 0]
    masks = np.diff(y[0], axis=0, prepend=0)
    assert len({tuple(mask) for mask in masks}) == 4
    key = jax.random.fold_in(jax.random.key(0), 0)
    for n, mask in enumerate(masks):
        kept = jax.random.bernoulli(jax.random.fold_in(key, n), 0.5, (1, 8))
        np.testing.assert_array_equal(mask, 2.0 * kept[0])


@pytest.mark.parametrize("ref", [False, True])
def test_broadcast_rngs_give_one_mask_per_call(ref):
    with nnx.var_defaults(ref=ref):
        rnn = nnx.RNN(Noisy(nnx.Rngs(dropout=0)), broadcast_rngs="dropout")
    call, masks = (jax if ref else nnx).jit(lambda rnn, x: rnn(x)), []
    for n in range(2):
        y = np.asarray(call(rnn, jnp.ones((1, 4, 8)))[0])
        np.testing.assert_array_equal(y, y[0] * np.arange(1, 5)[:, None])
        masks.append(y[0])
        assert counts(rnn) == [n + 1, 4 * (n + 1), 0]
    assert (masks[0] != masks[1]).any()


def test_broadcast_rngs_match_tags_in_every_mode(value_mode):
    with nnx.set_graph_mode(value_mode["graph"]), nnx.set_graph_updates(False):
        rnn = nnx.RNN(Noisy(nnx.Rngs(0)), broadcast_rngs="default")
        rnn(jnp.ones((1, 4, 8)))
        assert counts(rnn) == [1, 4, 0]
        other = nnx.RNN(Noisy(nnx.Rngs(0)), broadcast_rngs="dropout")
        other(jnp.ones((1, 4, 8)))
        assert counts(other) == [4, 4, 0]


# ------------------------------------------------------------------- state, transforms


@pytest.mark.parametrize("kind", [dict, nnx.StateAxes])
def test_state_axes_by_filter(kind):
    axes = kind({nnx.BatchStat: None, nnx.Cache: 0, ...: nnx.Carry})

    class Cell(Sum):
        def __init__(self):
            self.fixed = nnx.BatchStat(jnp.array(0.0))
            self.scanned = nnx.Cache(jnp.arange(4.0))
            self.carried = nnx.Variable(jnp.array(0.0))

        def __call__(self, carry, x):
            for variable in (self.fixed, self.scanned, self.carried):
                variable[...] += 1
            return super().__call__(carry, self.scanned + 0 * x)

    rnn = nnx.RNN(Cell(), state_axes=axes)
    assert rnn.state_axes == nnx.StateAxes(axes)
    np.testing.assert_array_equal(rnn(SEQUENCE)[0, :, 0], [1, 3, 6, 10])
    cell = rnn.cell
    assert (cell.fixed[...], cell.carried[...]) == (0, 4)
    np.testing.assert_array_equal(cell.scanned[...], [1, 2, 3, 4])


@pytest.mark.parametrize("broadcast_rngs", [None, "dropout"])
def test_intermediates_are_stacked_if_they_have_an_axis(broadcast_rngs):
    class Cell(Noisy):
        def __call__(self, carry, x):
            carry, y = super().__call__(carry, x)
            self.sow(nnx.Intermediate, "y", y)
            return carry, y

    axes = {nnx.Intermediate: 0, ...: nnx.Carry}
    cell = Cell(nnx.Rngs(dropout=0))
    rnn = nnx.RNN(cell, state_axes=axes, broadcast_rngs=broadcast_rngs)
    y, found = nnx.capture(rnn, nnx.Intermediate)(jnp.ones((2, 4, 3)))
    np.testing.assert_array_equal(found["cell"]["y"][0].swapaxes(0, 1), y)


def test_a_network_may_be_closed_over_while_its_first_carry_is_zeros():
    rnn, x = make(), normal(2, 4, 2)
    _, expected = cells.scan(rnn.cell, np.zeros((2, 3)), x)
    y = jax.jit(lambda x: rnn(x))(x)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    assert jax.eval_shape(lambda x: rnn(x), x).shape == (2, 4, 3)
    with pytest.raises(TypeError, match="contracting dimensions"):
        jax.eval_shape(lambda x: rnn(x), jnp.ones((2, 4, 5)))
    assert rnn.rngs.count[...] == 0
    assert not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(rnn))


def test_a_closed_over_network_that_needs_keys_is_refused():
    error = nnx.errors.TraceContextError
    for cell in (cell_that_draws(), Noisy(nnx.Rngs(0))):
        rnn = nnx.RNN(cell)
        with pytest.raises(error, match="Cannot mutate RngCount"):
            jax.jit(lambda x, rnn=rnn: rnn(x))(normal(2, 4, 2))
        assert rnn.rngs.count[...] == 0


def test_a_network_whose_variables_are_read_only_can_be_called():
    rnn, x = nnx.with_vars(make(), mutable=False), normal(2, 4, 2)
    np.testing.assert_array_equal(rnn(x), make()(x))


def test_each_eager_call_runs_the_cell():
    # Issue 12, defect 16: what it calls need not be the same each time.
    traces = []

    class Cell(Sum):
        def __call__(self, carry, x):
            traces.append(1)
            return super().__call__(carry, x)

    for _ in range(3):
        nnx.RNN(Cell())(SEQUENCE)
    assert len(traces) == 3


def test_the_program_is_that_of_a_plain_scan():
    def ours(rnn, x):
        return rnn(x, initial_carry=jnp.zeros((2, 3)))

    def plain(rnn, x):
        _, y = jax.lax.scan(rnn.cell, jnp.zeros((2, 3)), jnp.swapaxes(x, 0, 1))
        return jnp.swapaxes(y, 0, 1)

    def count(function):
        program = jax.jit(function).lower(make(rngs=False), normal(2, 4, 2))
        return program.as_text().count("stablehlo.")

    assert count(ours) == count(plain)


def test_a_failed_call_changes_nothing():
    rnn = nnx.RNN(Noisy(nnx.Rngs(dropout=0)), broadcast_rngs="dropout")
    rnn.cell.initialize_carry = lambda shape, rngs: rngs.normal((1, 5))
    rngs = nnx.Rngs(carry=0)
    for given in (None, rngs, rngs.carry):
        with pytest.raises(TypeError):
            rnn(jnp.ones((1, 4, 3)), rngs=given)
    assert counts(rnn) == [0, 0, 0] and rngs.carry.count[...] == 0


# ------------------------------------------------------------------------ Bidirectional


def make_both(**options):
    cells = [nnx.LSTMCell(2, 3, rngs=nnx.Rngs(seed)) for seed in (0, 1)]
    return nnx.Bidirectional(*map(nnx.RNN, cells), **options)


drawn = functools.partial(random_arrays.random, seed=1)


@pytest.mark.parametrize(("time_major", "lengths"), [(True, None), (False, [3, 1])])
def test_each_direction_is_an_rnn_of_its_own(time_major, lengths):
    both = make_both(time_major=time_major)
    x = drawn(4, 2, 2) if time_major else drawn(2, 4, 2)
    options = {"time_major": time_major, "seq_lengths": lengths, "return_carry": True}
    first, a = both.forward_rnn(x, **options)
    last, b = both.backward_rnn(x, reverse=True, keep_order=True, **options)
    carries, y = both(x, seq_lengths=lengths, return_carry=True)
    np.testing.assert_array_equal(y, jnp.concatenate([a, b], -1))
    jax.tree.map(np.testing.assert_array_equal, carries, (first, last))
    ignored = both(x, seq_lengths=lengths, reverse=True, keep_order=False)
    np.testing.assert_array_equal(ignored, y)


def test_outputs_are_merged_leaf_by_leaf():
    both, x = make_both(), drawn(2, 4, 2)
    total = make_both(merge_fn=jnp.add)(x)
    np.testing.assert_allclose(total, sum(jnp.split(both(x), 2, -1)), rtol=1e-6)


def test_the_first_carries_are_a_pair():
    both, x = make_both(return_carry=True), drawn(2, 4, 2)
    pair = both.forward_rnn.cell.initialize_carry((2, 2), nnx.Rngs(0))
    (_, (c, _)), _ = both(x, initial_carry=(pair, pair))
    assert c.shape == (2, 3)
    both.rngs.count[...] = 0
    for wrong in (pair[0], (pair,), {"a": pair}):
        with pytest.raises(ValueError, match="initial_carry must be a pair"):
            both(x, initial_carry=wrong)
    assert both.rngs.count[...] == 0


def test_one_stream_gives_the_keys_of_both_forward_first():
    both, x = make_both(), drawn(1, 4, 2)
    both(x)
    inner = (both.forward_rnn.rngs, both.backward_rnn.rngs)
    assert both.rngs.count[...] == 4
    assert [int(stream.count[...]) for stream in inner] == [0, 0]
    rngs = nnx.Rngs(carry=0)
    both(x, rngs=rngs)
    both(x, rngs=rngs.carry)
    assert (rngs.carry.count[...], both.rngs.count[...]) == (8, 4)
    without = make_both(rngs=False)
    without(x)
    assert without.forward_rnn.rngs.count[...] == 2


def test_rngs_are_made_kept_or_left_out():
    stream = nnx.RngStream(3, tag="any")
    assert make_both(rngs=stream).rngs is stream
    made = make_both().rngs
    assert (made.tag, made.key[...]) == ("carry", jax.random.key(0))
    absent = make_both(rngs=False)
    assert absent.rngs is None
    with pytest.raises(ValueError, match="static attribute"):
        absent.rngs = stream
    for wrong in (0, None, jax.random.key(0)):
        with pytest.raises(TypeError, match="rngs must be a Rngs"):
            make_both(rngs=wrong)


def test_one_network_for_both_directions_is_logged(caplog):
    network = nnx.RNN(nnx.GRUCell(2, 3, rngs=nnx.Rngs(0)))
    with caplog.at_level(logging.WARNING, logger="absl"):
        both = nnx.Bidirectional(network, network)
    assert "same object" in caplog.text and "share" in caplog.text
    assert both(drawn(1, 4, 2)).shape == (1, 4, 6)


# --------------------------------------------------------------------- several layers


def make_stack(cell="LSTMCell", **options):
    make_cell = getattr(nnx, cell)
    return nnx.StackedRNN(make_cell, 2, 3, num_layers=3, rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize("name", ["LSTMCell", "GRUCell"])
def test_each_layer_processes_what_the_one_before_returns(name):
    stack, x = make_stack(name), normal(4, 5, 2)
    carries, y = nnx.jit(lambda stack, x: stack(x, return_carry=True))(stack, x)
    zero = np.zeros((4, 3))
    expected = x
    for layer, carry in zip(stack.layers, carries, strict=True):
        first = (zero, zero) if name in cells.TWO_STATES else zero
        last, expected = cells.scan(layer.cell, first, expected)
        for found, wanted in zip(*map(cells.numbers, (carry, last)), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("time_major", [False, True])
def test_layers_of_two_directions_with_lengths_and_first_carries(time_major):
    stack, x = make_stack("GRUCell", bidirectional=True), normal(2, 4, 2)
    first = [(normal(2, 3, seed=n), normal(2, 3, seed=9 + n)) for n in range(3)]
    expected, last = x, []
    for layer, pair in zip(stack.layers, first, strict=True):
        carry, expected = layer(
            expected, initial_carry=pair, seq_lengths=LENGTHS, return_carry=True
        )
        last.append(carry)
    carries, y = stack(
        x.swapaxes(0, 1) if time_major else x,
        initial_carry=first,
        seq_lengths=LENGTHS,
        return_carry=True,
        time_major=time_major,
    )
    assert expected.shape == (2, 4, 6)
    np.testing.assert_array_equal(y.swapaxes(0, 1) if time_major else y, expected)
    jax.tree.map(np.testing.assert_array_equal, carries, tuple(last))


def test_dropout_is_between_layers_and_in_training_only():
    stack, x = make_stack("SimpleCell", dropout_rate=1.0), normal(2, 4, 2)
    bottom, *_, top = stack.layers
    # All is dropped before the last layer, and nothing after it.
    np.testing.assert_array_equal(stack(x), top(jnp.zeros((2, 4, 3))))
    stack.eval()
    np.testing.assert_array_equal(stack(x), top(stack.layers[1](bottom(x))))


def test_layers_get_first_carries_of_their_own():
    cell = functools.partial(nnx.SimpleCell, carry_init=nnx.initializers.normal())
    with pytest.warns(UserWarning, match="carry_init"):
        stack = nnx.StackedRNN(cell, 3, 3, num_layers=2, rngs=nnx.Rngs(0))
    (first, second), _ = stack(jnp.zeros((1, 0, 3)), return_carry=True)
    assert (first != second).all() and stack.rngs.count[...] == 2


def test_stacks_name_what_does_not_fit():
    with pytest.raises(ValueError, match="num_layers >= 1, got 0"):
        nnx.StackedRNN(nnx.GRUCell, 2, 3, num_layers=0, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="the carries of 3 layers"):
        make_stack("GRUCell")(normal(2, 4, 2), initial_carry=jnp.zeros((2, 3)))


def test_a_bidirectional_network_that_fails_has_drawn_nothing():
    forward, backward = (
        nnx.RNN(nnx.GRUCell(size, 4, rngs=nnx.Rngs(0))) for size in (3, 9)
    )
    both = nnx.Bidirectional(forward, backward)
    with pytest.raises(TypeError):
        both(normal(2, 5, 3))
    assert both.rngs.count[...] == 0


class Widening(nnx.SimpleCell):
    """Adds in float32, whatever comes in."""

    def __call__(self, carry, inputs):
        total = carry + jnp.asarray(inputs, jnp.float32)
        return total, total


def widening_activation(x):
    return jnp.asarray(x, jnp.float32)


@tables.cases(
    "cls, options",
    (Widening, {}),
    (nnx.SimpleCell, {"activation_fn": widening_activation}),
)
def test_a_carry_that_the_user_s_code_widens_is_not_rounded_unseen(cls, options):
    half = {"dtype": jnp.float16, "param_dtype": jnp.float16}
    cell = cls(3, 3, rngs=nnx.Rngs(0), **half, **options)
    rnn, x = nnx.RNN(cell, return_carry=True), jnp.full((1, 4, 3), 0.1, jnp.float16)
    phrase = f"(?s)step of the {cls.__name__} .*float16 into .*float32.*initial_carry"
    for _ in range(3):
        with pytest.raises(TypeError, match=phrase):
            rnn(x, initial_carry=jnp.zeros((1, 3), jnp.float16))
    last, y = rnn(x, initial_carry=jnp.zeros((1, 3), jnp.float32))
    assert last.dtype == y.dtype == jnp.float32
    np.testing.assert_array_equal(last, y[:, -1])
