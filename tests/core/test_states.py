"""State and FlatState, the functions on them, pure dicts, and nested mappings.

That what is made flat, pure or split comes back is a law of tests/test_round_trips.py.
"""

import copy
import pathlib
import pickle
import re
import types

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import graftree as nnx
from graftree import statelib, traversals
from tests import comparisons, tables

FlatState = statelib.FlatState
A, B = ("a",), ("b", 0)


class Special(nnx.State):
    """A subclass, registered by itself."""


def example():
    return nnx.State({"b": {"d": 1, "c": {"e": 2}}, "a": 3})


# ----------------------------------------------------------------- the mapping


def test_items_and_attributes_are_the_same():
    state = example()
    assert state.b.c.e == state["b"]["c"]["e"] == 2
    state.b.x = 5
    assert state["b"]["x"] == 5
    del state.b.x
    del state["a"]
    assert state == {"b": {"d": 1, "c": {"e": 2}}}


def test_missing_names():
    state = example()
    assert not hasattr(state, "x")
    for access in (getattr, delattr):
        with pytest.raises(AttributeError, match="No attribute 'x' in State"):
            access(state, "x")
    with pytest.raises(KeyError):
        state["x"]


def test_sub_mappings_are_views_of_the_stored_dict():
    state, inner = Special({"a": {"b": 1}}), nnx.State({"x": 1})
    view = state["a"]
    assert type(view) is Special and view is not state["a"]
    view["b"] = 2
    state["c"] = inner
    state.update(d=inner)
    assert state.raw_mapping == {"a": {"b": 2}, "c": {"x": 1}, "d": {"x": 1}}
    for mapping in (state, nnx.State({"c": inner})):
        assert mapping.raw_mapping["c"] is inner.raw_mapping


def test_constructor_takes_a_mapping_or_pairs_and_copies_if_told():
    mapping = {"a": {"b": 1}}
    assert nnx.State(mapping).raw_mapping is not mapping
    assert nnx.State(mapping).raw_mapping["a"] is mapping["a"]
    assert nnx.State(mapping, _copy=False).raw_mapping is mapping
    state = nnx.State({"a": 1})
    assert nnx.State([("a", 1)]) == state == nnx.State(state)
    with pytest.raises(ValueError, match="Expected a dictionary"):
        nnx.State([("a", 1)], _copy=False)
    for args, kwargs in (((), {}), (({},), {"a": 1})):
        with pytest.raises(TypeError):
            nnx.State(*args, **kwargs)


def test_mapping_protocol():
    state = example()
    assert len(state) == 2 and list(state) == ["b", "a"] and "a" in state
    assert isinstance(state.get("b"), nnx.State) and state.get("x", 0) == 0
    assert [type(value) for value in state.values()] == [nnx.State, int]
    assert state.pop("a") == 3 and state.setdefault("z", 1) == 1
    assert state.popitem()[0] == "b"
    state.clear()
    assert not state


def test_equality_is_that_of_dicts():
    state = example()
    plain = {"a": 3, "b": nnx.State({"c": {"e": 2}, "d": 1})}
    assert state == plain == state and state == nnx.State(plain)
    assert state != {"a": 3} and state != 3
    with pytest.raises(TypeError):
        hash(state)
    with pytest.raises(ValueError, match="truth value"):
        bool(nnx.State({"a": np.ones(2)}) == nnx.State({"a": np.ones(2)}))


def test_union():
    state = example()
    assert state | {} is state
    assert (state | {"b": {"d": 7}}) == {"b": {"d": 7, "c": {"e": 2}}, "a": 3}
    assert ({"a": 0, "z": 1} | state)["a"] == 3 and state["b"]["d"] == 1


def test_shallow_copies_share_what_is_below():
    state = example()
    shallow, deep = copy.copy(state), copy.deepcopy(state)
    shallow["n"] = 1
    shallow["b"]["d"] = 7
    assert "n" not in state and (state["b"]["d"], deep["b"]["d"]) == (7, 1)
    restored = pickle.loads(pickle.dumps(Special({"a": {"b": 1}})))
    assert type(restored) is Special and restored == {"a": {"b": 1}}


# ------------------------------------------------------------------ the pytree


def test_leaves_are_sorted_with_dict_keys():
    entries, treedef = jax.tree.flatten_with_path(example())
    paths = [jax.tree_util.keystr(path) for path, _ in entries]
    assert paths == ["['a']", "['b']['c']['e']", "['b']['d']"]
    assert treedef != jax.tree.structure(example().raw_mapping)
    assert jax.tree.unflatten(treedef, [3, 2, 1]) == example()


def test_values_of_variables_are_reached_and_variables_rebuilt():
    state = Special({"linear": {"kernel": nnx.Param(1)}})
    [(path, _)] = jax.tree.leaves_with_path(state)
    assert jax.tree_util.keystr(path) == "['linear']['kernel'].value"
    mapped = jax.tree.map(lambda x: x + 1, state)
    assert type(mapped) is Special and type(mapped.raw_mapping["linear"]) is dict
    assert type(mapped.linear.kernel) is nnx.Param
    assert (mapped.linear.kernel.get_value(), state.linear.kernel.get_value()) == (2, 1)


def test_keys_of_different_types_can_be_mixed():
    inner = {"b": 1, 10: 2, 2: 3, None: 4, (1, "z"): 5}
    for mapping in (inner, {"x": {"y": inner}}):
        state = nnx.State(mapping)
        mapped = jax.tree.map(lambda x: x, state)
        assert mapped == state and mapped.raw_mapping == mapping
        assert jax.tree.leaves(state) == nnx.to_flat_state(state).leaves
        # Numbers come first, by value.
        assert jax.tree.leaves(state)[:2] == [3, 2]


# ------------------------------------------------------------------ flat states


def flat(**leaves):
    return FlatState([((name,), leaf) for name, leaf in leaves.items()], sort=True)


def test_flat_state_is_a_sequence_of_pairs():
    state = FlatState([(B, 2), (A, 1)], sort=True)
    assert state.paths == (A, B) and state.leaves == [1, 2]
    assert len(state) == 2 and list(state) == [(A, 1), (B, 2)]
    assert state[-1] == (B, 2) and dict(state) == {A: 1, B: 2}
    assert isinstance(state[:1], FlatState) and list(state[:1]) == [(A, 1)]
    assert type(state.to_nested_state()) is nnx.State
    assert state.to_nested_state() == {"a": 1, "b": {0: 2}}


def test_order_is_kept_unless_asked_to_sort():
    items = [(("x",), 0), ((10,), 1), ((2,), 2), ((10,), 3)]
    assert FlatState(items, sort=False).leaves == [0, 1, 2, 3]
    assert FlatState(items, sort=True).leaves == [2, 1, 3, 0]
    with pytest.raises(TypeError):
        FlatState([])
    keys, leaves = (A, B), [1, 2]
    state = FlatState.from_sorted_keys_values(keys, leaves)
    assert state.paths is keys and state.leaves is leaves  # which are not copied
    assert FlatState.from_sorted_keys_values([A], (1,)).paths == (A,)


def test_flat_states_are_equal_by_identity_and_merged_in_order():
    state = flat(a=1)
    assert state == state and state != flat(a=1) and len({state, state}) == 1
    assert FlatState.merge(state) is state
    merged = FlatState.merge(flat(c=3, a=1), flat(b=2))
    assert list(merged) == [(("a",), 1), (("b",), 2), (("c",), 3)]


def test_flat_state_is_a_pytree_of_its_leaves():
    state = flat(a=1, b=2)
    doubled = jax.tree.map(lambda x: 2 * x, state)
    assert isinstance(doubled, FlatState) and doubled.paths == state.paths
    assert doubled.leaves == [2, 4]


def test_paths_are_grouped_by_value():
    state = nnx.State({"a": nnx.Param(1), "b": 1, "c": {"d": None}})
    path_in = nnx.filterlib.PathIn
    expected = {path_in(("a",), ("b",)): 1, path_in(("c", "d")): None}
    assert statelib.create_path_filters(state) == expected


# --------------------------------------------------- the functions, of any form


class Wrapper(dict):
    """A stand-in for objects that pair a State with something else."""

    @property
    def raw_mapping(self):
        return example().raw_mapping


MAPPINGS = {"state": example(), "dict": example().raw_mapping, "raw": Wrapper()}


@pytest.mark.parametrize("state", MAPPINGS.values(), ids=MAPPINGS)
def test_every_function_takes_any_mapping(state):
    assert nnx.to_flat_state(state).paths == (("a",), ("b", "c", "e"), ("b", "d"))
    assert nnx.map_state(lambda path, x: path, state)["b"]["d"] == ("b", "d")
    assert nnx.filter_state(state, nnx.PathContains("a")) == {"a": 3}
    assert nnx.merge_state(state) == example()
    assert statelib.diff(state, {"b": {"d": 0, "c": {"e": 0}}}) == {"a": 3}


@pytest.mark.parametrize("form", [list, dict, lambda x: FlatState(x, sort=True)])
def test_flat_forms_become_states(form):
    items = [(("b", "x"), 1), (("a",), 2), (("c", "x"), 3), (("b", "y"), 4)]
    state = nnx.from_flat_state(form(items), cls=Special)
    assert type(state) is Special
    assert state == {"b": {"x": 1, "y": 4}, "a": 2, "c": {"x": 3}}
    empty = nnx.State({"a": {"b": {}}, "c": 1})
    assert nnx.from_flat_state(form([*nnx.to_flat_state(empty)])) == {"c": 1}
    with pytest.raises(TypeError, match="Expected a State or another mapping, got lis"):
        nnx.to_flat_state([1])


@tables.cases(
    "items, says",
    ([(("a",), 1), (("a", "b"), 2)], r"Conflicting entries at path \('a',\)"),
    ([((), 1)], "the empty path"),
)
def test_paths_that_can_not_be_nested_are_refused(items, says):
    with pytest.raises(ValueError, match=says):
        nnx.from_flat_state(items)


def test_map_passes_variables_and_keeps_none():
    param, seen = nnx.Param(1), []
    state = nnx.map_state(lambda path, x: seen.append(x), nnx.State({"a": param}))
    assert seen[0] is param and state == {"a": None}


def leaves_of(state):
    return (state if isinstance(state, FlatState) else nnx.to_flat_state(state)).leaves


@pytest.mark.parametrize("is_flat", [True, False])
def test_split_gives_each_leaf_to_the_first_match_and_must_cover_all(is_flat):
    param, stat = nnx.Param(1), nnx.BatchStat(2)
    state = nnx.State({"a": {"p": param}, "b": stat, "c": 3})
    flat_state = nnx.to_flat_state(state)
    split = flat_state.split if is_flat else lambda *f: nnx.split_state(state, *f)
    select = flat_state.filter if is_flat else lambda *f: nnx.filter_state(state, *f)
    cls = FlatState if is_flat else nnx.State
    groups = split(nnx.Param, (nnx.Param, nnx.BatchStat), ...)
    assert [leaves_of(x) for x in groups] == [[param], [stat], [3]]
    assert leaves_of(groups[0])[0] is param
    assert type(split(...)) is cls and type(select(int)) is cls
    assert [leaves_of(x) for x in select(str, int)] == [[], [3]]
    told = "Non-exhaustive filters, got a non", "('b',): BatchStat", "`...`"
    with comparisons.raises(ValueError, *told):
        split(int)
    with pytest.raises(TypeError):
        split()
    with pytest.raises(ValueError, match="can only be used as the last"):
        select(..., int)
    with pytest.raises(ValueError, match="and 10 more"):
        nnx.split_state({i: i for i in range(30)}, str)


def test_merge_is_deep_the_last_wins_and_nothing_is_changed():
    first, second = {"a": {"b": 1, "c": 2}}, nnx.State({"a": {"b": 3}, "e": {}})
    merged = nnx.merge_state(first, second, {})
    assert type(merged) is nnx.State and merged == {"a": {"b": 3, "c": 2}}
    assert first == {"a": {"b": 1, "c": 2}} and second == {"a": {"b": 3}, "e": {}}
    assert nnx.merge_state({"a": {"b": 1}}, {"a": 2}) == {"a": 2}
    with pytest.raises(ValueError, match=r"Conflicting entries at path \('a', 'b'\)"):
        nnx.merge_state({"a": {"b": 1}}, {"a": {"b": {"c": 2}}})
    assert nnx.merge_state(second) is second
    assert type(nnx.merge_state({"a": 1}, cls=Special)) is Special


def test_diff_keeps_what_the_other_lacks():
    state = example()
    assert statelib.diff(state, {}) is state
    other = nnx.State({"a": 0, "b": {"d": 0}})
    assert statelib.diff(state, other) == {"b": {"c": {"e": 2}}}


OLDER = {
    "nnx.map_state": lambda s: s.map(lambda path, x: x),
    "nnx.to_flat_state": lambda s: s.flat_state().to_nested_state(),
    "nnx.from_flat_state": lambda s: s.from_flat_path(dict(nnx.to_flat_state(s))),
    "nnx.to_pure_dict": lambda s: s.to_pure_dict(),
    "nnx.replace_by_pure_dict": lambda s: s.replace_by_pure_dict({}) or s,
    "nnx.split_state": lambda s: s.split(...),
    "nnx.filter_state": lambda s: s.filter(...),
    "nnx.merge_state": lambda s: nnx.State.merge(s, {}),
    "nnx.statelib.diff": lambda s: s - {"z": 1},
}


@pytest.mark.parametrize("function", OLDER)
def test_older_methods_work_and_name_the_function(function):
    with pytest.warns(DeprecationWarning, match=function) as caught:
        result = OLDER[function](example())
    assert result == example()
    # Said of a file of ours, and so not shown by default.
    package = pathlib.Path(nnx.__file__).parent
    assert pathlib.Path(caught[0].filename).is_relative_to(package)


# ------------------------------------------------------------------- pure dicts


def state_of(*leaves):
    return nnx.State({"layers": {i: nnx.Param(x) for i, x in enumerate(leaves)}})


def test_variables_give_their_values_and_other_leaves_stay():
    array = jnp.ones(2)
    variable = nnx.Param(array)
    state = nnx.State({"b": {"v": variable, "e": {}}, "a": 1})
    pure = nnx.to_pure_dict(state)
    assert pure == {"a": 1, "b": {"v": array}} and list(pure) == ["a", "b"]
    assert type(pure) is dict and pure["b"]["v"] is array
    assert nnx.to_pure_dict(state, lambda leaf: leaf)["b"]["v"] is variable
    pure = nnx.to_pure_dict({"a": nnx.Param(array, ref=True)})
    assert isinstance(pure["a"], jax.Array) and pure["a"].tolist() == [1, 1]


def test_replacing_makes_new_variables_and_leaves_the_old_ones():
    old = nnx.Param(1, tag="x")
    state = nnx.State({"a": old, "b": 1})
    assert nnx.replace_by_pure_dict(state, {"a": 5}) is None
    new = state["a"]
    assert (type(new), new.get_value(), new.tag) == (nnx.Param, 5, "x")
    assert old.get_value() == state["b"] == 1
    nnx.replace_by_pure_dict(state, {"b": 2}, lambda old, new: (old, new))
    assert state["b"] == (1, 2)


def test_string_may_stand_for_an_integer_key():
    state = state_of(*range(12))
    nnx.replace_by_pure_dict(state, {"layers": {str(i): 100 + i for i in range(12)}})
    nnx.replace_by_pure_dict(state, {"other": {}, "layers": {0: {}}})
    assert [state["layers"][i].get_value() for i in range(12)] == [*range(100, 112)]
    state = nnx.State({"0": 1, 0: 2})
    nnx.replace_by_pure_dict(state, {"0": 3})
    assert state == {"0": 3, 0: 2}


@tables.cases(
    "pure, path",
    ({"b": 1}, "('b',)"),
    ({"layers": {"x": 1}}, "('layers', 'x')"),
    ({"layers": 1}, "('layers',)"),
    ({"layers": {0: {"x": 1}}}, "('layers', 0, 'x')"),
)
def test_unknown_path_is_refused_before_anything_changes(pure, path):
    state = state_of(1, 2)
    before = dict(state["layers"])
    phrase = f"(?s)key in pure_dict not available in state.*{re.escape(path)}"
    with pytest.raises(ValueError, match=phrase):
        nnx.replace_by_pure_dict(state, {"layers": {1: 7}, **pure})
    assert all(state["layers"][i] is x for i, x in before.items())
    assert before[1].get_value() == 2


def test_values_may_be_dicts_and_abstract_ones_are_filled():
    abstract = nnx.Param(jax.ShapeDtypeStruct((2,), jnp.float32))
    state = nnx.State({"a": nnx.Param({"x": 1}), "b": abstract})
    nnx.replace_by_pure_dict(state, {"a": {"x": 2}, "b": jnp.ones(2)})
    assert state["a"].get_value() == {"x": 2}
    assert state["b"].get_value().tolist() == [1, 1]


def test_keys_that_are_integers_are_restored():
    pure = {"0": {"-3": 1, "1_0": 2, "x": 3}, None: 4, (1, "2"): 5, "e": {}}
    restored = nnx.restore_int_paths(pure)
    assert restored == {0: {-3: 1, 10: 2, "x": 3}, None: 4, (1, "2"): 5}
    assert "0" in pure
    with pytest.raises(ValueError, match="two paths become the same"):
        nnx.restore_int_paths({"layers": {"0": 1, 0: 2}})


# -------------------------------------------------------------- nested mappings

KEYS = st.text(st.characters(exclude_characters="/"), min_size=1)
NESTED = st.recursive(
    st.dictionaries(KEYS, st.integers(), max_size=3),
    lambda inner: st.dictionaries(KEYS, inner | st.integers(), max_size=3),
    max_leaves=8,
)


@hypothesis.given(NESTED, st.sampled_from([None, "/"]))
def test_unflatten_undoes_flatten_that_keeps_empty_nodes(mapping, sep):
    entries = traversals.flatten_mapping(mapping, keep_empty_nodes=True, sep=sep)
    assert traversals.unflatten_mapping(entries, sep=sep) == mapping


@pytest.mark.parametrize("wrap", [dict, types.MappingProxyType, nnx.State])
def test_insertion_order_is_kept_and_empty_mappings_vanish(wrap):
    mapping = wrap({"b": {"c": 1, "e": {}}, "a": 2})
    expected = [(("b", "c"), 1), (("a",), 2)]
    assert list(traversals.flatten_mapping(mapping).items()) == expected
    assert traversals.flatten_to_sequence(mapping) == expected
    assert traversals.flatten_mapping({}, keep_empty_nodes=True) == {}


def test_is_leaf_sees_every_mapping_and_stops_there():
    seen = []

    def is_leaf(path, mapping):
        seen.append(path)
        return len(path) == 1

    mapping = {"a": {"b": 1}, "c": {}, "d": 2}
    entries = traversals.flatten_mapping(mapping, is_leaf=is_leaf)
    assert entries == {("a",): {"b": 1}, ("c",): {}, ("d",): 2}
    assert seen == [(), ("a",), ("c",)]
    whole = traversals.flatten_to_sequence(mapping, is_leaf=lambda path, x: True)
    assert whole == [((), mapping)]


def test_empty_node_is_a_pytree_without_leaves():
    empty = traversals.empty_node
    assert jax.tree.leaves(empty) == [] and jax.tree.map(str, empty) == empty
    assert hash(type(empty)()) == hash(empty)


def test_pairs_are_unflattened_and_other_things_refused():
    assert traversals.unflatten_mapping([(("a", "b"), 1)]) == {"a": {"b": 1}}
    with pytest.raises(TypeError, match="expected Mapping or Iterable; got int"):
        traversals.unflatten_mapping(3)
    for flatten in (traversals.flatten_mapping, traversals.flatten_to_sequence):
        with pytest.raises(AssertionError, match="expected Mapping; got int"):
            flatten(3)
    with pytest.raises(TypeError):  # a separator needs keys that are strings
        traversals.flatten_mapping({1: 2}, sep="/")
