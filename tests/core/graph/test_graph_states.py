"""GraphState: a State that knows its GraphDef."""

import copy
import pickle

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx


def unpacked():
    return nnx.unpack(
        nnx.Dict(a=nnx.Param(jnp.array(1.0)), b=nnx.Dict(c=jnp.array(2.0)))
    )


def test_entries_are_those_of_the_state():
    graph_state = unpacked()
    assert list(graph_state) == ["a", "b"] and len(graph_state) == 2
    assert graph_state.a is graph_state["a"] and "a" in graph_state
    graph_state.b.c = 5
    assert graph_state["b"]["c"] == 5
    del graph_state["a"]
    assert "a" not in graph_state
    with pytest.raises(AttributeError, match="No attribute 'x' in State"):
        graph_state.x


def test_trees_of_graph_states_are_graph_states():
    mapped = jax.tree.map(lambda x: x * 2, unpacked())
    assert type(mapped) is nnx.GraphState and mapped.a[...] == 2.0
    assert nnx.merge(mapped).b.c == 4.0


def test_wrong_state_is_refused():
    with pytest.raises(ValueError, match="Expected a State object, got dict"):
        nnx.GraphState(nnx.graphdef(nnx.Dict()), {})


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_copies_are_graph_states(copied):
    assert nnx.merge(copied(unpacked())).a[...] == 1.0


def test_union_keeps_the_graphdef():
    joined = unpacked() | nnx.State({"a": nnx.Param(jnp.array(7.0))})
    assert type(joined) is nnx.GraphState and nnx.merge(joined).a[...] == 7.0
