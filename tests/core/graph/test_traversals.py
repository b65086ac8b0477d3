"""Walks over objects in both modes; maps."""

import hypothesis
import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree.core.graph import nodes, traversals
from tests import strategies


class Model(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.array(1.0))
        self.items = nnx.data([nnx.Param(jnp.array(2.0)), {"a": jnp.array(3.0)}])
        self.static = "x"


def test_iter_graph_yields_children_before_parents():
    found = [path for path, x in nnx.iter_graph(Model()) if isinstance(x, nnx.Variable)]
    assert found == [("items", 0), ("w",)]
    assert [path for path, _ in nnx.iter_graph(Model())][-1] == ()


@strategies.examples(30, 200)
@hypothesis.given(strategies.graphs())
def test_a_walk_over_nodes_lists_what_a_whole_walk_lists(root):
    listed = [*nnx.iter_graph(root, graph=True)]
    expected = [(path, x) for path, x in listed if nodes.is_node(x) and x is not None]
    found = [*traversals.iter_nodes(root, graph=True)]
    assert [path for path, _ in found] == [path for path, _ in expected]
    # What is inside a State is a new State each time.
    assert all(
        a is b or (type(a) is type(b) and not nodes.is_graph_node(a))
        for (_, a), (_, b) in zip(found, expected, strict=True)
    )


def test_cycles_end_in_graph_mode_and_are_errors_in_tree_mode():
    model = Model()
    model.me = model
    assert sum(x is model for _, x in nnx.iter_graph(model, graph=True)) == 1
    with pytest.raises(ValueError, match="found at paths"):
        list(nnx.iter_graph(model, graph=False))


def test_map_reaches_every_leaf_with_its_path():
    seen = []

    def f(path, x):
        seen.append(path)
        return x

    nnx.map(f, Model())
    assert {("w",), ("items", 0), ("items", 1, "a")} <= set(seen)


def test_recursive_map_does_not_change_its_input():
    model = Model()
    mapped = nnx.recursive_map(
        lambda path, x: nnx.Param(9) if isinstance(x, nnx.Variable) else x, model
    )
    assert mapped is not model and mapped.w.get_value() == 9
    assert model.w[...] == 1.0


def test_duplicates_are_listed_with_all_their_paths():
    shared = nnx.Param(jnp.array(1.0))
    model = nnx.Dict(a=shared, b=nnx.Param(jnp.array(2.0)), c=shared)
    assert nnx.find_duplicates(model) == [[("a",), ("c",)]]
    assert nnx.find_duplicates(model, only=nnx.BatchStat) == []


def test_walks_do_not_touch_what_they_visit():
    rngs = nnx.Rngs(0)
    list(nnx.iter_graph(rngs))
    list(nnx.iter_modules(nnx.Dict(rngs=rngs)))
    assert rngs.default.count[...] == 0
