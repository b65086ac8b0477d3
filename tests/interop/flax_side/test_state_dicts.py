"""Handlers say what does not fit."""

import pytest

from graftree.interop.flax_side import pytree_dataclasses, state_dicts


def test_keys_that_are_the_same_as_strings_are_refused():
    with pytest.raises(ValueError, match="same as strings"):
        state_dicts.to_state_dict({1: 0, "1": 0})


def test_a_leaf_in_the_place_of_a_dict_is_named_by_its_path():
    with pytest.raises(ValueError, match=r"Expected a dict at path \./a .* got int"):
        state_dicts.from_state_dict({"a": {"b": 1}}, {"a": 3})


def test_the_path_is_forgotten_after_an_error():
    with pytest.raises(ValueError, match="size of the list"):
        state_dicts.from_state_dict({"a": [1]}, {"a": {}})
    assert state_dicts.current_path() == ""


def test_only_classes_become_dataclasses():
    with pytest.raises(TypeError, match="made from a class, got 3"):
        pytree_dataclasses.dataclass(3)
