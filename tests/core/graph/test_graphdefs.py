"""GraphDefs: equality, hashes, paths."""

import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx


class Model(nnx.Module):
    def __init__(self, size=2, value=1.0):
        self.a = nnx.Param(jnp.full(size, value))
        self.b = nnx.data([jnp.zeros(1), 3])
        self.c = self.a
        self.k = size


def test_equality_is_structural():
    a, b = nnx.graphdef(Model(value=1.0)), nnx.graphdef(Model(value=2.0))
    assert a is not b and a == b and hash(a) == hash(b)
    assert a != nnx.graphdef(Model(size=3)) and a != "x"


def test_sharing_is_structure():
    shared, parted = Model(), Model()
    parted.c = nnx.Param(jnp.ones(2))
    assert nnx.graphdef(shared) != nnx.graphdef(parted)


def test_static_arrays_compare_by_content():
    def make(x):
        return nnx.graphdef(nnx.Dict(a=nnx.Param(1, scale=np.array(x))))

    assert make([1, 2]) == make([1, 2]) and make([1, 2]) != make([1, 3])


def test_leaves_are_listed_with_their_paths():
    graphdef = nnx.graphdef(Model())
    assert graphdef.paths() == (("a",), ("b", 0)) and graphdef.num_leaves == 2
    assert graphdef.tree() == {"a": 0, "b": {0: 1}}
    assert [d is None for _, d in graphdef.leaves()] == [False, True]


def test_a_blueprint_gives_each_value_a_place_below_that_of_its_node():
    graphdef = nnx.graphdef(Model())
    blueprint = graphdef.blueprint()
    # The model; its attributes a, b, c, k; the items of b.
    assert blueprint.values == [None, None, None, None, 2, None, 3]
    assert [(i, node.type) for i, node in blueprint.objects] == [(0, Model)]
    (_, variable), _ = graphdef.leaves()
    assert blueprint.leaves == [(variable, 1), (None, 5)]
    assert blueprint.references == [(variable.index, 3)]
    items, root = blueprint.nodes
    assert (items.place, items.keys, items.start, items.stop) == (2, (0, 1), 5, 7)
    assert (root.place, root.keys, root.start, root.stop) == (0, tuple("abck"), 1, 5)


@pytest.mark.parametrize("root", [3, jnp.ones(2), nnx.Param(1)], ids=str)
def test_the_blueprint_of_a_leaf_has_one_place(root):
    blueprint = nnx.graphdef(root).blueprint()
    assert blueprint.values == [None] and blueprint.nodes == []
    assert [place for _, place in blueprint.leaves] == [0]


def test_both_modes_have_the_same_paths(graph):
    model = nnx.Dict(b=nnx.List([nnx.Param(1), jnp.ones(1)]), a=nnx.Param(2))
    graphdef = nnx.graphdef(model, graph=graph)
    assert graphdef.paths() == (("a",), ("b", 0), ("b", 1))
    assert graphdef.is_tree is not graph


def test_graphdefs_are_frozen_leafless_pytrees():
    graphdef = nnx.graphdef(Model())
    with pytest.raises(dataclasses.FrozenInstanceError):
        graphdef.nodes = []
    assert jax.tree.leaves(graphdef) == []
    assert jax.jit(lambda g: g)(graphdef) == graphdef


def test_copies_and_pickles_are_equal():
    graphdef = nnx.graphdef(Model())
    assert copy.deepcopy(graphdef) == graphdef
    assert pickle.loads(pickle.dumps(graphdef)) == graphdef


def test_parts_print_their_types_by_name():
    text = repr(nnx.graphdef(Model()))
    assert (
        "NodeDef(type='Model', index=0" in text and "VariableDef(type='Param'" in text
    )
    assert "NodeRef(index=1)" in text and "num_leaves=2" in text
