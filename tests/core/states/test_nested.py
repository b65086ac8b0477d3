"""Flat and nested mappings."""

import types

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftree.core.states import nested
from graftree.core.states.states import State

KEYS = st.text(st.characters(exclude_characters="/"), min_size=1)
NESTED = st.recursive(
    st.dictionaries(KEYS, st.integers(), max_size=3),
    lambda inner: st.dictionaries(KEYS, inner | st.integers(), max_size=3),
    max_leaves=8,
)


@given(NESTED, st.sampled_from([None, "/"]))
def test_unflatten_undoes_flatten_that_keeps_empty_nodes(mapping, sep):
    flat = nested.flatten_mapping(mapping, keep_empty_nodes=True, sep=sep)
    assert nested.unflatten_mapping(flat, sep=sep) == mapping


def test_insertion_order_is_kept_and_empty_mappings_vanish():
    mapping = {"b": {"c": 1, "e": {}}, "a": 2}
    assert list(nested.flatten_mapping(mapping).items()) == [
        (("b", "c"), 1),
        (("a",), 2),
    ]
    assert nested.flatten_to_sequence(mapping) == [(("b", "c"), 1), (("a",), 2)]


def test_empty_root_gives_nothing():
    assert nested.flatten_mapping({}, keep_empty_nodes=True) == {}


@pytest.mark.parametrize("wrap", [types.MappingProxyType, State])
def test_any_mapping_is_flattened(wrap):
    assert nested.flatten_mapping(wrap({"a": {"b": 1}})) == {("a", "b"): 1}


def test_is_leaf_sees_every_mapping_and_stops_there():
    seen = []

    def is_leaf(path, mapping):
        seen.append(path)
        return len(path) == 1

    mapping = {"a": {"b": 1}, "c": {}, "d": 2}
    flat = nested.flatten_mapping(mapping, is_leaf=is_leaf)
    assert flat == {("a",): {"b": 1}, ("c",): {}, ("d",): 2}
    assert seen == [(), ("a",), ("c",)]
    assert nested.flatten_to_sequence(mapping, is_leaf=lambda p, x: True) == [
        ((), mapping)
    ]


def test_empty_node_is_a_pytree_without_leaves():
    assert jax.tree.leaves(nested.empty_node) == []
    assert jax.tree.map(str, nested.empty_node) == nested.empty_node
    assert hash(nested.EmptyNode()) == hash(nested.empty_node)


def test_separator_needs_string_keys():
    with pytest.raises(TypeError):
        nested.flatten_mapping({1: 2}, sep="/")


@pytest.mark.parametrize(
    "flatten", [nested.flatten_mapping, nested.flatten_to_sequence]
)
def test_only_mappings_are_flattened(flatten):
    with pytest.raises(AssertionError, match="expected Mapping; got int"):
        flatten(3)


def test_pairs_are_unflattened_and_other_things_refused():
    assert nested.unflatten_mapping([(("a", "b"), 1)]) == {"a": {"b": 1}}
    with pytest.raises(TypeError, match="expected Mapping or Iterable; got int"):
        nested.unflatten_mapping(3)


def test_path_through_a_leaf_is_refused():
    with pytest.raises(ValueError, match=r"Conflicting entries at path \('a',\)"):
        nested.nest([(("a",), 1), (("a", "b"), 2)])


def test_empty_path_is_refused():
    with pytest.raises(ValueError, match="The empty path"):
        nested.nest([((), 1)])


def test_leaves_of_equal_parents_need_not_stand_together():
    items = [(("a", "x"), 1), (("b", "x"), 2), (("a", "y"), 3), (("c",), 4)]
    assert nested.nest(items) == {"a": {"x": 1, "y": 3}, "b": {"x": 2}, "c": 4}


def test_raw_mapping_of_a_state_is_its_dict():
    inner = {"a": 1}
    assert nested.raw_mapping(State(inner, _copy=False)) is inner
    assert nested.raw_mapping(inner) is inner
    with pytest.raises(TypeError, match="Expected a State or another mapping, got int"):
        nested.raw_mapping(3)


@pytest.mark.peers
@given(NESTED, st.booleans(), st.sampled_from([None, "/"]))
def test_flat_mappings_equal_those_of_the_peer(mapping, keep, sep):
    peer = pytest.importorskip("flax.nnx").traversals
    ours = nested.flatten_mapping(mapping, keep_empty_nodes=keep, sep=sep)
    theirs = peer.flatten_mapping(mapping, keep_empty_nodes=keep, sep=sep)
    empties = {k for k, v in theirs.items() if v == peer.empty_node}
    assert {k for k, v in ours.items() if v == nested.empty_node} == empties
    assert list(ours) == list(theirs)
    assert nested.flatten_to_sequence(mapping) == peer.flatten_to_sequence(mapping)
