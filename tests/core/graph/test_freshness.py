"""An object that did not change is taken apart from memory, with the same result."""

import gc
import weakref

import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree.core.graph import flattening, freshness

# How the object is given: alone, or together with another one.
WHOLES = pytest.mark.parametrize(
    "whole",
    [lambda model: model, lambda model: {"model": model, "more": [OTHER]}],
    ids=["alone", "together"],
)


class Model(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(1, 2, rngs=nnx.Rngs(0))
        self.array = jnp.zeros(3)
        self.items = nnx.data({"b": jnp.ones(1), "a": [nnx.Param(jnp.ones(1))]})


OTHER = Model()


def flatten(model, graph):
    return freshness.flatten_node(model, graph, "split")


def flatten_anew(model, graph):
    if graph:
        return flattening.flatten_graph(model)
    return flattening.flatten_tree(model, "split")


@WHOLES
def test_memo_is_used_from_the_third_time(graph, whole):
    model = Model()
    first, second, third, fourth = [flatten(whole(model), graph)[0] for _ in range(4)]
    assert first == second == third
    assert first is not second
    assert second is third is fourth


@WHOLES
def test_memo_gives_the_leaves_as_they_are_now(graph, whole):
    model = Model()
    for _ in range(3):
        flatten(whole(model), graph)
    model.array = jnp.ones(4)
    model.linear.kernel[...] = jnp.ones((1, 2))
    leaves = flatten(whole(model), graph)[1]
    expected = flatten_anew(whole(model), graph)[1]
    assert len(leaves) == len(expected)
    assert all(a is b for a, b in zip(leaves, expected, strict=True))


@WHOLES
def test_leaves_are_a_new_list_each_time(graph, whole):
    model = Model()
    for _ in range(3):
        flatten(whole(model), graph)[1].clear()
    expected = flatten_anew(whole(model), graph)[1]
    assert len(flatten(whole(model), graph)[1]) == len(expected) > 0


@WHOLES
def test_memo_is_made_anew_after_a_change(graph, whole):
    model = Model()
    for _ in range(3):
        flatten(whole(model), graph)
    model.linear.bias = None
    model.items["a"].append(nnx.Param(jnp.ones(2)))
    for _ in range(3):
        graphdef, leaves = flatten(whole(model), graph)
        expected, expected_leaves = flatten_anew(whole(model), graph)
        assert graphdef == expected
        assert all(a is b for a, b in zip(leaves, expected_leaves, strict=True))


@WHOLES
def test_memos_of_static_values_that_take_turns_are_kept(graph, whole):
    model = Model()
    found = []
    for value in (2, 2, 3, 2, 3, 2):
        model.linear.out_features = value
        graphdef, leaves = flatten(whole(model), graph)
        expected, expected_leaves = flatten_anew(whole(model), graph)
        assert graphdef == expected
        assert all(a is b for a, b in zip(leaves, expected_leaves, strict=True))
        found.append(graphdef)
    _, two, three, *others = found
    assert [*map(id, others)] == [id(two), id(three), id(two)]


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


@WHOLES
def test_memo_keeps_neither_the_object_nor_a_replaced_array(whole):
    model = Model()
    for _ in range(3):
        flatten(whole(model), True)
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


def test_members_of_a_container_may_change_places(graph):
    pair = [Model(), Model()]
    for _ in range(3):
        for node in (pair, (*pair,), pair[::-1], [pair[0], Model()], [pair[0]]):
            graphdef, leaves = flatten(node, graph)
            expected, expected_leaves = flatten_anew(node, graph)
            assert graphdef == expected
            assert all(a is b for a, b in zip(leaves, expected_leaves, strict=True))


def test_members_may_share_variables():
    model, other = Model(), Model()
    for _ in range(3):
        before = flatten((model, other), True)[1]
    other.items["c"] = model.linear.kernel
    for _ in range(3):
        assert len(flatten((model, other), True)[1]) == len(before)
        with pytest.raises(ValueError, match="linear"):
            nnx.split((model, other), graph=False)


def test_members_of_which_one_refers_to_the_others_are_freed():
    model, other = Model(), Model()
    model.others = nnx.data([other])
    for _ in range(3):
        flatten((model, other), True)
    gone = [weakref.ref(x) for x in (model, other, other.linear.kernel)]
    del model, other
    gc.collect()
    assert [x() for x in gone] == [None] * 3
