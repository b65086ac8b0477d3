"""Calls of objects in their functional form."""

import jax
import jax.numpy as jnp

import graftree as nnx


class Counter(nnx.Module):
    def __init__(self):
        self.count = nnx.Variable(jnp.array(0))

    def increment(self, by=1):
        self.count[...] += by
        return self.count[...]


class Pair(nnx.Module):
    def __init__(self):
        self.counters = nnx.List([Counter(), Counter()])


def test_attributes_and_items_reach_a_method():
    pair = nnx.split(Pair())
    out, (graphdef, state) = nnx.call(pair).counters[1].increment(3)
    assert out == 3
    counts = [c.count[...] for c in nnx.merge(graphdef, state).counters]
    assert counts == [0, 3]


def test_inputs_are_untouched_under_jit():
    counter = Counter()
    step = jax.jit(lambda pair: nnx.call(pair).increment()[1])
    _, state = step(nnx.split(counter))
    assert state["count"][...] == 1
    assert counter.count[...] == 0


def test_eager_calls_change_the_variables_of_the_state():
    counter = Counter()
    nnx.call(nnx.split(counter)).increment()
    assert counter.count[...] == 1


def test_apply_follows_the_mode_in_force():
    graphdef, state = nnx.split(Counter())
    with nnx.set_graph_mode(False):
        _, (found, _) = graphdef.apply(state).increment()
    assert found.is_tree
    assert not graphdef.apply(state, graph=True).increment()[1][0].is_tree
