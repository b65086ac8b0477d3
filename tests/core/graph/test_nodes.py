"""What is a node, and how its children are listed."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from graftree.core.graph import nodes

Pair = collections.namedtuple("Pair", ["second", "first"])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Moments:
    variance: object
    mean: object


REF = jax.new_ref(jnp.ones(2))
# Value: is it a (node, graph node, leaf of the state)?
KINDS = [
    (nnx.Dict(), (True, True, False)),
    (nnx.Object(), (True, True, False)),
    (nnx.Rngs(0), (True, True, False)),
    (nnx.Param(1), (False, True, True)),
    (REF, (False, True, True)),
    (jnp.ones(2), (False, False, True)),
    (np.ones(2), (False, False, True)),
    ([1], (True, False, False)),
    ({"a": 1}, (True, False, False)),
    ((1,), (True, False, False)),
    (Pair(1, 2), (True, False, False)),
    (Moments(1, 2), (True, False, False)),
    (nnx.State({"a": 1}), (True, False, False)),
    (None, (True, False, False)),
    (1, (False, False, False)),
    ("x", (False, False, False)),
    (len, (False, False, False)),
]


@pytest.mark.parametrize(
    ("value", "expected"), KINDS, ids=[type(value).__name__ for value, _ in KINDS]
)
def test_every_value_is_of_one_kind(value, expected):
    found = (
        nodes.is_node(value),
        nodes.is_graph_node(value),
        nodes.is_node_leaf(value),
    )
    assert found == expected and nodes.is_node_type(type(value)) is expected[0]


def test_tracers_of_arrays_and_refs_are_told_apart():
    seen = []
    jax.jit(lambda x, ref: seen.extend(map(nodes.is_graph_node, (x, ref))))(1.0, REF)
    assert seen == [False, True]


@pytest.mark.parametrize(
    ("node", "keys"),
    [
        (nnx.Dict(b=1, a=2), ["a", "b"]),
        (nnx.List(range(12)), [*range(12), "_length"]),
        ({"b": 1, "a": 2}, ["a", "b"]),
        ({10: 1, 2: 2}, [2, 10]),
        ([3, 4], [0, 1]),
        (Pair(1, 2), ["first", "second"]),
        (Moments(1, 2), ["mean", "variance"]),
        (None, []),
        (3, []),
    ],
    ids=str,
)
def test_children_are_sorted_by_key(node, keys):
    assert [child.key for child in nodes.children(node)] == keys


def test_pytrees_decide_what_of_them_is_data():
    listed = nodes.children(nnx.Dict(a=nnx.data(1), b=1))
    assert [child.is_data for child in listed] == [True, False]


def test_values_decide_where_nothing_is_checked():
    class Hidden(nnx.Module, pytree=False):
        def __init__(self):
            self.a = jnp.ones(1)

    assert [child.is_data for child in nodes.children(Hidden())] == [None]


def test_pytree_nodes_are_containers():
    assert nodes.is_pytree_node([1]) and not nodes.is_pytree_node(jnp.ones(2))
    assert not nodes.is_pytree_node(nnx.Dict())
    assert nodes.is_pytree_node(nnx.Dict(), check_graph_registry=False)


def test_graph_nodes_with_children_are_no_variables():
    assert nodes.is_node_module(nnx.Dict()) and not nodes.is_node_module(nnx.Param(1))
