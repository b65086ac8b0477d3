"""TrainState: a frozen pytree whose steps give new objects."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import graftree as nnx


class Scale(nnx.Module):
    """Multiplies by a Param and counts its calls."""

    def __init__(self):
        self.scale = nnx.Param(jnp.array([1.0, 2.0]))
        self.calls = nnx.BatchStat(jnp.array(0))

    def __call__(self, x):
        self.calls[...] += 1
        return self.scale[...] * x

    def twice(self, x):
        return 2 * self(x)


class StateWithStats(nnx.TrainState):
    """A TrainState with one more field."""

    stats: nnx.State


def make(tx=None):
    graphdef, params, stats = nnx.split(Scale(), nnx.Param, nnx.BatchStat)
    tx = optax.sgd(1.0) if tx is None else tx
    return StateWithStats.create(graphdef, params=params, tx=tx, stats=stats)


def test_fields_and_their_paths():
    state = make(optax.adam(0.1))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state)]
    assert paths == [
        ".params['scale'].value",
        ".opt_state[0].count",
        ".opt_state[0].mu['scale'].value",
        ".opt_state[0].nu['scale'].value",
        ".step",
        ".stats['calls'].value",
    ]


def test_moments_are_variables_of_the_type_of_the_param():
    state = make(optax.adam(0.1))
    assert type(state.opt_state[0].mu["scale"]) is nnx.Param
    assert state.step == 0 and state.step.dtype == jnp.int32


def test_fields_cannot_be_assigned():
    for state in (make(), make().replace(step=3)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            state.step = 1


def test_apply_takes_states_and_names_of_fields():
    state = make()
    for arguments in (("params", "stats"), (state.params, "stats")):
        y, (graphdef, new) = state.apply(*arguments)(jnp.ones(2))
        np.testing.assert_array_equal(y, [1.0, 2.0])
        assert graphdef == state.graphdef and sorted(new) == ["calls", "scale"]
    y, _ = state.apply("params", "stats").twice(jnp.ones(2))
    np.testing.assert_array_equal(y, [2.0, 4.0])


def test_apply_refuses_fields_that_are_no_state():
    with pytest.raises(TypeError, match=r"StateWithStats\.step to be a State"):
        make().apply("step")


def test_apply_gradients_gives_a_new_object():
    state = make()
    grads = jax.tree.map(jnp.ones_like, state.params)
    new = state.apply_gradients(grads, stats=nnx.State({}))
    np.testing.assert_array_equal(new.params["scale"][...], [0.0, 1.0])
    np.testing.assert_array_equal(state.params["scale"][...], [1.0, 2.0])
    assert (new.step, state.step) == (1, 0)
    assert type(new) is StateWithStats and dict(new.stats) == {}


def test_training_under_plain_jit():
    state = make(optax.sgd(0.25))

    @jax.jit
    def train_step(state, x):
        def loss(params):
            # Copied, so that the inner trace may write them.
            y, (_, new) = state.apply(params, jax.tree.map(jnp.copy, state.stats))(x)
            return jnp.sum(y**2) / 2, nnx.filter_state(new, nnx.BatchStat)

        grads, stats = jax.grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads, stats=stats)

    for _ in range(2):
        state = train_step(state, jnp.ones(2))
    # d(s^2 / 2) = s: each step scales by 0.75.
    np.testing.assert_allclose(state.params["scale"][...], [0.5625, 1.125])
    assert (state.step, state.stats["calls"][...]) == (2, 2)


def test_subclasses_may_have_static_fields_and_defaults():
    class Named(nnx.TrainState, kw_only=True):
        name: str = dataclasses.field(default="a", metadata={"pytree_node": False})

    graphdef, params = nnx.split(nnx.Dict(w=nnx.Param(jnp.ones(1))))
    state = Named.create(graphdef, params=params, tx=optax.sgd(0.1))
    assert state.name == "a" and len(jax.tree.leaves(state)) == 2
    assert jax.tree.structure(state) != jax.tree.structure(state.replace(name="b"))


def test_class_is_generic():
    assert nnx.TrainState[Scale].create.__func__ is nnx.TrainState.create.__func__
