"""Metadata: hooks, and what the arguments of a Variable become."""

import pytest

import graftree as nnx
from graftree.core.imprints import HashableMapping
from graftree.core.variables import metadata


def test_hooks_are_applied_to_the_result_of_the_last():
    hooks = (lambda _, x: x + 1, lambda _, x: x * 10)
    assert metadata.run_hooks(hooks, None, 1) == 20
    assert metadata.run_hooks(hooks[0], None, 1) == 2


def test_absorbing_leaves_the_box_as_it_is():
    boxed = nnx.VariableMetadata(1, metadata={"ref": False, "tag": "x"})
    flags = {"hijax": None, "ref": None, "eager_sharding": None}
    value, flags, entries = metadata.absorb(boxed, flags, {"a": 1})
    assert (value, flags["ref"], entries) == (1, False, {"a": 1, "tag": "x"})
    assert boxed.metadata == {"ref": False, "tag": "x"}


def test_changes_name_what_is_fixed():
    current = {"hijax": False, "ref": False, "eager_sharding": True, "tag": "x"}
    assert metadata.changed(current, ({"a": 1},), {})["ref"] is False
    with pytest.raises(ValueError, match=r"copy\(ref=True\)"):
        metadata.changed(current, (), {"ref": True})


def test_get_does_not_raise():
    mapping = HashableMapping({"a": 1})
    assert (mapping.get("a"), mapping.get("b"), mapping.get("b", 2)) == (1, None, 2)


def test_older_flags_are_moved_and_current_ones_win():
    entries = {"use_ref": True, "tag": "x"}
    flags = {"hijax": None, "ref": None}
    metadata.take_older_flags(entries, flags)
    assert entries == {"tag": "x"} and flags == {"hijax": None, "ref": True}
    flags = {"hijax": None, "ref": False}
    metadata.take_older_flags({"is_hijax": True}, flags)
    assert flags == {"hijax": True, "ref": False}


def test_updated_metadata_is_the_same_object_if_nothing_differs():
    mapping = HashableMapping({"hijax": False, "ref": False})
    assert metadata.updated(mapping, {}) is mapping
    assert dict(metadata.updated(mapping, {"ref": True})) == {
        "hijax": False,
        "ref": True,
    }


def test_mutable_is_stored_only_where_it_is_false():
    mapping = HashableMapping({"hijax": False})
    frozen = metadata.updated(mapping, {"mutable": False})
    assert frozen["mutable"] is False
    assert metadata.updated(frozen, {"mutable": True}) == mapping


def test_what_says_how_a_variable_is_stored_is_not_taken_over():
    own = HashableMapping({"hijax": False, "ref": True, "tag": "x"})
    other = HashableMapping(
        {"hijax": True, "ref": False, "mutable": False, "tag": "y", "more": 1}
    )
    assert dict(metadata.taken_over(own, other)) == {
        "hijax": False,
        "ref": True,
        "tag": "y",
        "more": 1,
    }
