"""GraphDef (contract section 4)."""

import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from tests.strategies import Block, Node, Scale, param


def test_it_is_a_pytree_without_leaves(graph):
    graphdef = nnx.graphdef(Block(a=param()), graph=graph)
    assert jax.tree.leaves(graphdef) == []
    assert jax.jit(lambda g: g)(graphdef) == graphdef


def test_it_is_frozen_slotted_and_generic():
    graphdef = nnx.graphdef(Block(a=param()))
    with pytest.raises(dataclasses.FrozenInstanceError):
        graphdef.nodes = []
    assert not hasattr(graphdef, "__dict__")
    nnx.GraphDef[Block], nnx.PureState[Block]


def test_values_and_shapes_do_not_matter(graph):
    one = nnx.graphdef(Block(a=param(), b=jnp.ones(3)), graph=graph)
    other = nnx.graphdef(
        Block(b=jnp.zeros((1, 2)), a=nnx.Param(jnp.ones(()))), graph=graph
    )
    assert one == other and hash(one) == hash(other)


def tied():
    p = param()
    return Block(a=p, b=p)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Block(a=param()), Node()),
        (Block(a=param()), Block(b=param())),
        (Block(a=1), Block(a=2)),
        (Block(a=param()), Block(a=nnx.BatchStat(jnp.ones(2)))),
        (Block(a=param()), Block(a=nnx.Param(jnp.ones(2), tag="x"))),
        (tied(), Block(a=param(), b=param())),
        (Block(a=nnx.data(1)), Block(a=1)),
        (Block(a=param()), Block(a=Scale(jnp.ones(2)))),
    ],
)
def test_structure_matters(one, other):
    assert nnx.graphdef(one) != nnx.graphdef(other)


def test_the_modes_differ_and_merge_takes_either():
    m = Block(a=param())
    by_mode = [nnx.graphdef(m, graph=graph) for graph in (True, False)]
    assert by_mode[0] != by_mode[1]
    for graphdef in by_mode:
        assert nnx.merge(graphdef, nnx.state(m)).a is m.a


def test_unhashable_static_values():
    graphdef = nnx.graphdef(Block(a=[1, 2], b=param()))
    with pytest.raises(TypeError, match="unhashable"):
        hash(graphdef)
    assert graphdef == nnx.graphdef(Block(a=[1, 2], b=param()))
    assert jax.jit(lambda g: jnp.ones(g.num_leaves))(graphdef).shape == (1,)
    with pytest.raises(ValueError, match="[Nn]on-hashable"):
        jax.jit(lambda g: 0, static_argnums=0)(graphdef)


def test_unhashable_metadata(graph):
    graphdef = nnx.graphdef(nnx.Param(jnp.ones(1), notes=[1]), graph=graph)
    with pytest.raises(TypeError, match="unhashable"):
        hash(graphdef)


def test_jit_traces_once_per_structure(graph):
    count = 0

    @jax.jit
    def f(graphdef, state):
        nonlocal count
        count += 1
        return nnx.merge(graphdef, state).a * 2

    m = Block(a=param())
    for _ in range(3):
        f(*nnx.split(m, graph=graph))
        f(*nnx.split(Block(a=param(3.0)), graph=graph))
    assert count == 1
    m.b = 1
    f(*nnx.split(m, graph=graph))
    f(*nnx.split(m, graph=graph))
    assert count == 2


def test_it_can_be_a_static_argument():
    graphdef, state = nnx.split(Block(a=param()))
    f = jax.jit(lambda g, s: nnx.merge(g, s).a[...], static_argnums=0)
    assert f(graphdef, state).tolist() == [1.0, 1.0]


def test_copies_compare_equal(graph):
    graphdef = nnx.graphdef(Block(a=param(), b=[1], c=nnx.List([param()])), graph=graph)
    assert copy.deepcopy(graphdef) == graphdef
    assert pickle.loads(pickle.dumps(graphdef)) == graphdef


# ----------------------------------------------------------------- what clients look at


def test_the_first_node_tells_the_kind_of_root():
    first = [
        (Block(a=param()), True, nnx.graphlib.NodeDef),
        (param(), True, nnx.graphlib.VariableDef),
        (Block(a=param()), False, nnx.graphlib.TreeNodeDef),
    ]
    for node, graph, kind in first:
        assert isinstance(nnx.graphdef(node, graph=graph).nodes[0], kind)
    for leaf in (42, jnp.ones(2)):
        assert nnx.graphdef(leaf, graph=True).nodes == []


def test_a_root_seen_before_is_a_reference():
    m = Block(a=param())
    index = nnx.graphlib.RefMap()
    nnx.flatten(m, ref_index=index)
    graphdef, flat = nnx.flatten(m, ref_index=index)
    assert isinstance(graphdef.nodes[0], nnx.graphlib.NodeRef)
    assert graphdef.num_leaves == len(flat) == 0


def test_fields_of_the_definitions():
    p = nnx.Param(jnp.ones(2), tag="x", ref=True)
    graphdef = nnx.graphdef(Block(a=p, b=p, n=3))
    node, variable, again = graphdef.nodes
    assert (node.type, node.index, node.outer_index) == (Block, 0, None)
    assert node.num_attributes == 3
    assert (variable.type, variable.index) == (nnx.Param, 1)
    assert variable.metadata["tag"] == "x"
    assert variable.array_refdef == nnx.graphlib.ArrayRefDef(2, None)
    assert again == nnx.graphlib.NodeRef(1)
    assert [key for key, _ in graphdef.attributes] == ["a", "b", "n"]
    assert graphdef.num_leaves == 1


def test_the_path_index_of_trees():
    (node, *_) = nnx.graphdef({"b": param(), "a": [1, param()]}, graph=False).nodes
    assert node.type is dict
    assert node.path_index == ((("a", 0), 0), (("a", 1), 1), (("b",), 2))


def test_repr_names_types_and_indices():
    graphdef = nnx.graphdef(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    assert "NodeDef(type='Linear', index=0" in repr(graphdef.nodes)
    assert "num_leaves=2" in repr(graphdef)
