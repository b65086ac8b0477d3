"""The state of an RNN: its random keys, that of its cell, and what transforms see."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests.nn import recurrent_cases
from tests.nn.recurrent_cases import SEQUENCE, Sum, make, normal


def noisy_cell(library):
    """A class of cells, of one of the libraries, that draw a key and count in steps."""

    class Noisy(library.Module):
        num_feature_axes = 1

        def __init__(self, rngs):
            self.dropout = library.Dropout(0.5, rngs=rngs)
            self.steps = library.BatchStat(jnp.array(0))

        def __call__(self, carry, x):
            self.steps[...] += 1
            carry = carry + self.dropout(x)
            return carry, carry

        def initialize_carry(self, input_shape, rngs=None):
            return jnp.zeros(input_shape)

    return Noisy


Noisy = noisy_cell(nnx)


def counts(rnn):
    dropout = rnn.cell.dropout.rngs.count
    return [int(x[...]) for x in (dropout, rnn.cell.steps, rnn.rngs.count)]


# ----------------------------------------------------------------------- random keys


def test_rngs_are_made_forked_or_left_out():
    assert make().rngs.tag == "carry"
    assert make().rngs.key[...] == jax.random.key(0)
    rngs = nnx.Rngs(carry=5)
    expected = jax.random.fold_in(jax.random.key(5), 0)
    assert make(rngs=rngs).rngs.key[...] == expected
    assert make(rngs=nnx.RngStream(5, tag="any")).rngs.key[...] == expected
    assert rngs.carry.count[...] == 1
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


def test_the_first_carry_gets_the_keys_of_the_network():
    init = nnx.initializers.normal()
    with pytest.warns(UserWarning, match="carry_init"):
        cell = nnx.GRUCell(2, 3, carry_init=init, rngs=nnx.Rngs(0))
    rnn, x = nnx.RNN(cell), normal(1, 4, 2)
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
    call, masks = nnx.jit(lambda rnn, x: rnn(x)), []
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
    y = rnn(SEQUENCE)
    np.testing.assert_array_equal(y[0, :, 0], [1, 3, 6, 10])
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


def test_refs_are_updated_under_plain_jit():
    with nnx.var_defaults(ref=True):
        rnn = nnx.RNN(Noisy(nnx.Rngs(0)))
    call, x = jax.jit(lambda rnn, x: rnn(x)), jnp.ones((1, 4, 16))
    first, second = call(rnn, x), call(rnn, x)
    assert counts(rnn) == [8, 8, 0]
    assert (first[0, 0] != second[0, 0]).any()


def test_a_network_may_be_closed_over_while_its_first_carry_is_zeros():
    rnn, x = make(), normal(2, 4, 2)
    _, expected = recurrent_cases.scan(rnn.cell, np.zeros((2, 3)), x)
    y = jax.jit(lambda x: rnn(x))(x)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    assert jax.eval_shape(lambda x: rnn(x), x).shape == (2, 4, 3)
    assert rnn.rngs.count[...] == 0
    assert not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(rnn))


def test_a_closed_over_network_that_needs_keys_is_refused():
    with pytest.warns(UserWarning, match="carry_init"):
        cell = nnx.GRUCell(2, 3, carry_init=nnx.initializers.normal(), rngs=nnx.Rngs(0))
    for rnn in (nnx.RNN(cell), nnx.RNN(Noisy(nnx.Rngs(0)))):
        with pytest.raises(
            nnx.errors.TraceContextError, match="Cannot mutate RngCount"
        ):
            jax.jit(lambda x, rnn=rnn: rnn(x))(normal(2, 4, 2))
        assert rnn.rngs.count[...] == 0


def test_a_network_whose_variables_are_read_only_can_be_called():
    rnn = nnx.with_vars(make(), mutable=False)
    np.testing.assert_array_equal(
        rnn(SEQUENCE[..., [0, 0]]), make()(SEQUENCE[..., [0, 0]])
    )


def test_ensembles_are_mapped():
    x, networks = normal(3, 4, 2), [make(rngs=nnx.Rngs(carry=n)) for n in range(2)]
    networks[1].cell.dense_i.bias[...] += 1.0
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *networks)
    ys = nnx.vmap(lambda m, x: m(x), in_axes=(0, None))(stacked, x)
    for rnn, y in zip(networks, ys, strict=True):
        _, expected = recurrent_cases.scan(rnn.cell, np.zeros((3, 3)), x)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    assert stacked.rngs.count[...].tolist() == [1, 1]


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
    rnn, x = make(rngs=False), normal(2, 4, 2)

    def ours(rnn, x):
        return rnn(x, initial_carry=jnp.zeros((2, 3)))

    def plain(rnn, x):
        _, y = jax.lax.scan(rnn.cell, jnp.zeros((2, 3)), jnp.swapaxes(x, 0, 1))
        return jnp.swapaxes(y, 0, 1)

    texts = [jax.jit(f).lower(rnn, x).as_text() for f in (ours, plain)]
    ours, plain = (text.count("stablehlo.") for text in texts)
    assert ours == plain


@pytest.mark.parametrize(
    "options", [{}, {"state_axes": {nnx.Param: None, ...: nnx.Carry}}]
)
def test_plain_pickle_works(options):
    rnn, x = make(**options), normal(2, 4, 2)
    copy = pickle.loads(pickle.dumps(rnn))
    assert nnx.graphdef(copy) == nnx.graphdef(rnn)
    np.testing.assert_array_equal(copy(x), rnn(x))


def test_a_failed_call_changes_nothing():
    rnn = nnx.RNN(Noisy(nnx.Rngs(dropout=0)), broadcast_rngs="dropout")
    rnn.cell.initialize_carry = lambda shape, rngs: rngs.normal((1, 5))
    rngs = nnx.Rngs(carry=0)
    for given in (None, rngs, rngs.carry):
        with pytest.raises(TypeError):
            rnn(jnp.ones((1, 4, 3)), rngs=given)
    assert counts(rnn) == [0, 0, 0] and rngs.carry.count[...] == 0


@pytest.mark.peers
@pytest.mark.parametrize("broadcast_rngs", [None, "dropout"])
def test_masks_in_cells_are_those_of_the_peer(peer, broadcast_rngs):
    ours, theirs = (
        library.RNN(
            noisy_cell(library)(library.Rngs(dropout=3)), broadcast_rngs=broadcast_rngs
        )
        for library in (nnx, peer)
    )
    for _ in range(2):
        x = jnp.ones((2, 4, 3))
        np.testing.assert_array_equal(ours(x), theirs(x))
        assert counts(ours) == counts(theirs)
