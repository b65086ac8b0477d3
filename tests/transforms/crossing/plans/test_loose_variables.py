"""Plans for States and Variables as arguments do what calls without one do."""

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import graftree as nnx
from tests import strategies
from tests.modes import GRAPH, GRAPH_UPDATES, TREE
from tests.threads import run_in_threads
from tests.transforms.crossing.plans.test_plans import unplanned


class Model(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.full(2, 3.0))
        self.count = nnx.BatchStat(jnp.zeros(()))


def arguments():
    """A State, Variables in containers, an object among them, and arrays."""
    state = nnx.State(
        {
            "a": {"x": nnx.Param(jnp.ones(2)), "y": nnx.Cache(jnp.zeros(1))},
            "b": nnx.Param(jnp.full(2, 2.0)),
        }
    )
    loose = [nnx.Param(jnp.ones(1)), (nnx.Param(jnp.ones(2), tag=1), None)]
    return {"state": state, "loose": loose, "model": Model(), "x": jnp.ones(())}


MUTATIONS = (
    lambda tree, k: None,
    lambda tree, k: tree["state"]["b"].set_value(jnp.full(2, float(k))),
    lambda tree, k: tree["state"]["b"].set_value(jnp.full(k + 1, 2.0)),
    lambda tree, k: tree["state"]["b"].set_value({"p": jnp.ones(k + 1)}),
    lambda tree, k: tree["state"].__setitem__("b", nnx.Param(jnp.ones(2))),
    lambda tree, k: tree["state"].__setitem__("b", nnx.BatchStat(jnp.ones(2))),
    lambda tree, k: tree["state"].__setitem__("b", jnp.full(2, float(k))),
    lambda tree, k: tree["state"].__setitem__(f"c{k}", nnx.Param(jnp.ones(1))),
    lambda tree, k: tree["state"].__setitem__("a", {"x": nnx.Param(jnp.ones(1))}),
    lambda tree, k: tree["state"]["a"].__setitem__("x", nnx.Param(jnp.ones(2))),
    lambda tree, k: tree.__setitem__("state", jax.tree.map(jnp.sin, tree["state"])),
    lambda tree, k: tree.__setitem__("state", nnx.State({})),
    lambda tree, k: tree.__setitem__("state", tree["state"].raw_mapping),
    lambda tree, k: tree["loose"].append(nnx.Param(jnp.ones(1))),
    lambda tree, k: tree["loose"].reverse(),
    lambda tree, k: tree["loose"].__setitem__(0, (nnx.Param(jnp.ones(1)), ())),
    lambda tree, k: tree["loose"].__setitem__(0, {"q": nnx.Param(jnp.ones(1))}),
    lambda tree, k: tree["loose"].__setitem__(0, None),
    lambda tree, k: tree["loose"].__setitem__(0, jnp.full(2, float(k))),
    lambda tree, k: tree["loose"].__setitem__(0, tree["state"].get("b")),
    lambda tree, k: tree["loose"].__setitem__(0, tree["model"].kernel),
    lambda tree, k: tree["model"].kernel.set_value(jnp.full(k + 1, 2.0)),
    lambda tree, k: tree["model"].kernel.set_metadata(tag=k),
    lambda tree, k: setattr(tree["model"], "size", k),
    lambda tree, k: tree.__setitem__("model", Model()),
    lambda tree, k: tree.__setitem__("x", jnp.full(k, 2.0)),
    lambda tree, k: [v.set_metadata(tag=k) for v in variables_in(tree["state"])],
    lambda tree, k: [v.set_metadata(mutable=k == 0) for v in variables_in(tree)],
)


def variables_in(tree) -> list[Any]:
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return [x for x in leaves if isinstance(x, nnx.Variable)]


def visit(tree):
    """Depends on all of a tree, writes some Variables, and returns new ones."""
    total = jnp.sum(tree["x"])
    for number, variable in enumerate(variables_in(tree)):
        values = jax.tree.leaves(variable.get_value())
        tag = variable.get_metadata().get("tag") or 0
        total += (number + 2 + 7 * tag) * sum(map(jnp.sum, values))
        if variable.get_metadata().get("mutable", True) and number % 2:
            variable.set_value(jax.tree.map(lambda x: x + 1, variable.get_value()))
    return total, jax.tree.map(jnp.cos, tree["state"])


VISITS = {
    tuple(mode.items()): nnx.jit(visit, **mode) for mode in (GRAPH_UPDATES, GRAPH, TREE)
}


def outcome(function, *args):
    """What a call gives, or the kind of error that it raises."""
    try:
        return function(*args)
    except Exception as error:
        return type(error)


@strategies.examples(8, 60)
@given(data=st.data())
def test_planned_calls_equal_unplanned_ones(mode, data):
    step = VISITS[tuple(mode.items())]
    ours, theirs = arguments(), arguments()
    steps = st.tuples(st.sampled_from(MUTATIONS), st.integers(0, 1))
    for mutate, k in data.draw(st.lists(steps, min_size=1, max_size=8)):
        for _ in range(data.draw(st.integers(1, 3))):
            assert_same(outcome(step, ours), outcome(unplanned, step, theirs))
            assert_same(ours, theirs)
        mutations = [outcome(mutate, tree, k) for tree in (ours, theirs)]
        assert isinstance(mutations[0], type) == isinstance(mutations[1], type)
    assert_same(outcome(step, ours), outcome(unplanned, step, theirs))
    assert_same(ours, theirs)


def assert_same(one, other):
    if isinstance(one, type):
        assert one is other
    else:
        jax.tree.map(np.testing.assert_array_equal, one, other)


def decay(state):
    return jax.tree.map(lambda x: x * 0.5, state)


@pytest.mark.parametrize("donated", [(), (0,)], ids=["plain", "donated"])
def test_a_functional_loop_takes_its_state_apart_once(mode, donated, packs):
    step = nnx.jit(decay, donate_argnums=donated, **mode)
    state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    expected = np.asarray(state["kernel"][...])
    for _ in range(4):
        state = step(state)
        expected = expected / 2
    assert len(packs) == 1
    assert type(state["kernel"]) is nnx.Param
    np.testing.assert_array_equal(state["kernel"][...], expected)


def test_pairs_of_objects_are_packed_twice(mode, packs):
    step = nnx.jit(lambda pair, x: pair[0].kernel + pair[1].kernel + x, **mode)
    pair = Model(), Model()
    for count in range(4):
        np.testing.assert_array_equal(step(pair, count), np.full(2, 6.0 + count))
    assert len(packs) == 2


def test_plans_keep_no_variables_of_a_state(mode):
    step = nnx.jit(decay, **mode)
    state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    gone = []
    for _ in range(3):
        gone += map(weakref.ref, variables_in(state))
        state = step(state)
    gc.collect()
    assert [ref() for ref in gone] == [None] * 6


def test_variables_of_the_caller_are_written(mode, packs):
    step = nnx.jit(lambda variables: variables[1].set_value(jnp.ones(3)), **mode)
    for _ in range(3):
        pair = [nnx.Param(jnp.zeros(3)), nnx.Param(jnp.zeros(3))]
        step(pair)
        assert [float(x.sum()) for x in pair] == [0, 3]
    assert len(packs) == 1


@pytest.mark.parametrize("donated", [(), (0,)], ids=["plain", "donated"])
def test_nothing_is_written_into_variables_of_another_trace(mode, donated):
    step = nnx.jit(lambda x: x.set_value(x + 1), donate_argnums=donated, **mode)
    for _ in range(2):
        step(nnx.Param(jnp.zeros(3)))
    kept, zeros = [], jnp.zeros(3)
    jax.eval_shape(lambda: kept.append(nnx.Param(zeros)))
    with pytest.raises(nnx.errors.TraceContextError):
        step(kept[0])
    np.testing.assert_array_equal(zeros, np.zeros(3))  # which has not been donated


def test_a_ref_in_two_variables_is_seen(mode):
    step = nnx.jit(lambda pair: pair[0].sum() + pair[1].sum(), **mode)
    pair = [nnx.Param(jnp.ones(2)), nnx.Param(jnp.ones(2))]
    for _ in range(2):
        step(pair)
    ref = jax.new_ref(jnp.full(2, 3.0))
    for variable in pair:
        variable.set_raw_value(ref)
    with pytest.raises(
        ValueError, match=r"only one reference .*pair\[0\] and pair\[1\]"
    ):
        step(pair)


def test_returned_variables_stay_the_callers_own(packs):
    @nnx.jit(graph=True, graph_updates=True)
    def step(state):
        state["a"].set_value(state["a"] + 1)
        return {"old": state["a"], "new": nnx.Param(state["a"] * 2)}

    state = nnx.State({"a": nnx.Param(jnp.zeros(2))})
    for count in range(1, 4):
        out = step(state)
        assert out["old"] is state["a"]
        np.testing.assert_array_equal(out["old"], np.full(2, float(count)))
        np.testing.assert_array_equal(out["new"], np.full(2, 2.0 * count))
    assert len(packs) == 1


def test_threads_may_share_a_function_of_states(mode):
    step = nnx.jit(decay, **mode)

    def work(start):
        state = nnx.State({"a": nnx.Param(jnp.full(2, start))})
        for _ in range(20):
            state = step(state)
        np.testing.assert_array_equal(state["a"], np.full(2, start * 0.5**20))

    run_in_threads(*[lambda i=i: work(float(i + 1)) for i in range(4)])
