"""States as plain nested dicts of values."""

import jax
import jax.numpy as jnp
import pytest

from graftree.core.states import pure_dicts
from graftree.core.states.states import State
from graftree.core.variables.kinds import Param


def state_of(*values):
    return State({"layers": {i: Param(value) for i, value in enumerate(values)}})


def test_variables_give_their_values_and_other_leaves_stay():
    array = jnp.ones(2)
    state = State({"b": {"v": Param(array), "e": {}}, "a": 1})
    pure = pure_dicts.to_pure_dict(state)
    assert pure == {"a": 1, "b": {"v": array}} and list(pure) == ["a", "b"]
    assert type(pure) is dict and pure["b"]["v"] is array


def test_refs_give_their_arrays():
    pure = pure_dicts.to_pure_dict({"a": Param(jnp.ones(2), ref=True)})
    assert isinstance(pure["a"], jax.Array) and pure["a"].tolist() == [1, 1]


def test_extract_fn_decides_what_is_kept():
    variable = Param(1)
    pure = pure_dicts.to_pure_dict({0: variable}, lambda leaf: leaf)
    assert pure == {0: variable} and pure[0] is variable


def test_replacing_makes_new_variables_and_leaves_the_old_ones():
    old = Param(jnp.ones(2), tag="x")
    state = State({"a": old, "b": 1})
    assert pure_dicts.replace_by_pure_dict(state, {"a": 5}) is None
    assert type(state["a"]) is Param and state["a"].get_value() == 5
    assert state["a"].tag == "x" and state["b"] == 1
    assert old.get_value().tolist() == [1, 1]


def test_replace_fn_gets_old_and_new():
    state = State({"a": 1})
    pure_dicts.replace_by_pure_dict(state, {"a": 2}, lambda old, new: (old, new))
    assert state["a"] == (1, 2)


def test_string_may_stand_for_an_integer_key():
    state = state_of(*range(12))
    new = {"layers": {str(i): 100 + i for i in range(12)}}
    pure_dicts.replace_by_pure_dict(state, new)
    assert [state["layers"][i].get_value() for i in range(12)] == [*range(100, 112)]


def test_exact_key_wins_over_an_integer():
    state = State({"0": 1, 0: 2})
    pure_dicts.replace_by_pure_dict(state, {"0": 3})
    assert state == {"0": 3, 0: 2}


@pytest.mark.parametrize(
    ("pure", "path"),
    [
        ({"b": 1}, "('b',)"),
        ({"layers": {"x": 1}}, "('layers', 'x')"),
        ({"layers": 1}, "('layers',)"),
        ({"layers": {0: {"x": 1}}}, "('layers', 0, 'x')"),
    ],
)
def test_unknown_path_is_refused_before_anything_changes(pure, path):
    state = state_of(1, 2)
    before = state["layers"][0]
    phrase = "key in pure_dict not available in state"
    with pytest.raises(ValueError, match=phrase) as caught:
        pure_dicts.replace_by_pure_dict(state, {"layers": {1: 7}, **pure})
    assert path in str(caught.value)
    assert state["layers"][0] is before and state["layers"][1].get_value() == 2


def test_empty_parts_change_nothing():
    state = state_of(1)
    pure_dicts.replace_by_pure_dict(state, {"other": {}, "layers": {0: {}}})
    assert state["layers"][0].get_value() == 1


def test_variables_that_hold_dicts_make_the_round_trip():
    state = State({"a": Param({"x": 1})})
    pure = pure_dicts.to_pure_dict(state)
    pure_dicts.replace_by_pure_dict(state, {"a": {"x": pure["a"]["x"] + 1}})
    assert state["a"].get_value() == {"x": 2}


def test_abstract_states_are_filled():
    state = State({"a": Param(jax.ShapeDtypeStruct((2,), jnp.float32))})
    pure_dicts.replace_by_pure_dict(state, {"a": jnp.ones(2)})
    assert state["a"].get_value().tolist() == [1, 1]


def test_keys_that_are_integers_are_restored():
    pure = {"0": {"-3": 1, "1_0": 2, "x": 3}, None: 4, (1, "2"): 5, "e": {}}
    restored = pure_dicts.restore_int_paths(pure)
    assert restored == {0: {-3: 1, 10: 2, "x": 3}, None: 4, (1, "2"): 5}
    assert "0" in pure


def test_integers_that_two_strings_stand_for_are_not_dropped():
    with pytest.raises(ValueError, match="two paths become the same"):
        pure_dicts.restore_int_paths({"layers": {"0": 1, 0: 2}})
