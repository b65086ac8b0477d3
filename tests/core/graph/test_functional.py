"""split, merge and their relatives: what the contract tests leave open."""

import jax
import jax.numpy as jnp

import graftree as nnx


class Model(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))
        self.s = nnx.BatchStat(jnp.zeros(2))
        self.a = jnp.full(2, 3.0)
        self.k = "static"

    def scaled(self, x):
        return self.w * x


def test_groups_of_filters_cover_the_state():
    graphdef, params, rest = nnx.split(Model(), nnx.Param, ...)
    assert list(params) == ["w"] and list(rest) == ["a", "s"]
    merged = nnx.merge(graphdef, params, rest)
    assert merged.k == "static" and merged.w[...].tolist() == [1.0, 1.0]


def test_split_shares_and_merge_shares():
    model = Model()
    graphdef, state = nnx.split(model)
    assert state["w"][...] is model.w[...]
    assert nnx.merge(graphdef, state).a is model.a


def test_split_works_on_shapes():
    shapes = jax.eval_shape(Model)
    graphdef, state = nnx.split(shapes)
    assert graphdef == nnx.graphdef(Model()) and state["w"].shape == (2,)


def test_graphdef_and_state_are_a_function_of_the_structure():
    @jax.jit
    def f(graphdef, state):
        traces.append(None)
        return nnx.merge(graphdef, state).scaled(2.0)

    traces = []
    for _ in range(2):
        assert f(*nnx.split(Model())).tolist() == [2.0, 2.0]
    assert len(traces) == 1


def test_pop_removes_what_it_returns():
    model = Model()
    popped = nnx.pop(model, nnx.BatchStat)
    assert list(popped) == ["s"] and not hasattr(model, "s")


def test_pure_state_has_values_in_the_place_of_variables():
    pure = nnx.as_pure(nnx.state(Model()))
    assert pure["w"].tolist() == [1.0, 1.0]


def test_states_of_both_modes_are_equal(graph):
    state = nnx.state(Model(), graph=graph)
    assert list(state) == ["a", "s", "w"]
    assert [type(leaf) for leaf in (state["s"], state["w"])] == [
        nnx.BatchStat,
        nnx.Param,
    ]
