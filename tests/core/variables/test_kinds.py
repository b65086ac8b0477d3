"""The registry of names beyond the contract tests."""

import pytest

import graftree as nnx


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match=r"(?s)'nope'.*batch_stats.*params"):
        nnx.variable_type_from_name("nope")


def test_made_types_have_no_dict():
    made = nnx.variable_type_from_name("made_without_dict", allow_register=True)
    assert not hasattr(made(1), "__dict__")


def test_first_of_several_names_is_the_name():
    class Named(nnx.Variable):
        pass

    for name in ("named_first", "named_second"):
        nnx.register_variable_name(name, Named)
    assert nnx.variable_name_from_type(Named) == "named_first"
