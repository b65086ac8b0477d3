"""An object that did not change is taken apart from memory, with the same result."""

import weakref

import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree.core.graph import flattening, freshness

MODES = pytest.mark.parametrize("graph", [True, False], ids=["graph", "tree"])


class Model(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(1, 2, rngs=nnx.Rngs(0))
        self.array = jnp.zeros(3)
        self.items = nnx.data({"b": jnp.ones(1), "a": [nnx.Param(jnp.ones(1))]})


def flatten(model, graph):
    return freshness.flatten_node(model, graph, "split")


def flatten_anew(model, graph):
    if graph:
        return flattening.flatten_graph(model)
    return flattening.flatten_tree(model, "split")


@MODES
def test_memo_is_used_from_the_third_time(graph):
    model = Model()
    first, second, third, fourth = [flatten(model, graph)[0] for _ in range(4)]
    assert first == second == third
    assert first is not second
    assert second is third is fourth


@MODES
def test_memo_gives_the_leaves_as_they_are_now(graph):
    model = Model()
    for _ in range(3):
        flatten(model, graph)
    model.array = jnp.ones(4)
    model.linear.kernel[...] = jnp.ones((1, 2))
    leaves = flatten(model, graph)[1]
    expected = flatten_anew(model, graph)[1]
    assert len(leaves) == len(expected) == 5
    assert all(a is b for a, b in zip(leaves, expected, strict=True))


@MODES
def test_leaves_are_a_new_list_each_time(graph):
    model = Model()
    for _ in range(3):
        flatten(model, graph)[1].clear()
    assert len(flatten(model, graph)[1]) == 5


@MODES
def test_memo_is_made_anew_after_a_change(graph):
    model = Model()
    for _ in range(3):
        flatten(model, graph)
    model.linear.bias = None
    model.items["a"].append(nnx.Param(jnp.ones(2)))
    for _ in range(3):
        graphdef, leaves = flatten(model, graph)
        expected, expected_leaves = flatten_anew(model, graph)
        assert graphdef == expected
        assert all(a is b for a, b in zip(leaves, expected_leaves, strict=True))


def test_modes_have_memos_of_their_own():
    model = Model()
    for _ in range(3):
        tree, graph = flatten(model, False)[0], flatten(model, True)[0]
    assert tree.is_tree
    assert not graph.is_tree


def test_aliases_are_still_refused_in_tree_mode():
    model = Model()
    for _ in range(3):
        flatten(model, False)
    model.again = model.linear.kernel
    for _ in range(3):
        with pytest.raises(ValueError, match="again"):
            nnx.split(model, graph=False)


def test_memo_keeps_neither_the_object_nor_a_replaced_array():
    model = Model()
    for _ in range(3):
        flatten(model, True)
    array = weakref.ref(model.array)
    model.array = jnp.ones(3)
    assert array() is None
    gone = weakref.ref(model)
    del model
    assert gone() is None


def test_copies_have_no_memo():
    model = Model()
    for _ in range(3):
        flatten(model, True)
    clone = nnx.clone(model)
    clone.array = jnp.ones(9)
    assert flatten(clone, True)[1][0].shape == (9,)
