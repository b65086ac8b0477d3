"""Defaults of new Variables beyond the contract tests."""

import pytest

import graftree as nnx
from graftree.core.variables import defaults


def test_current_reads_one_default():
    with nnx.var_defaults(ref=True):
        assert defaults.current("ref") is True
        assert defaults.current("hijax") is False


def test_defaults_are_equal_by_content():
    assert nnx.var_defaults() == nnx.var_defaults()
    with nnx.var_defaults(ref=True):
        assert nnx.var_defaults() == nnx.variablelib.VarDefaults(hijax=False, ref=True)


def test_both_defaults_are_set_and_undone_together():
    with pytest.raises(KeyError), nnx.var_defaults(ref=True, hijax=True):
        assert dict(nnx.var_defaults()) == {"hijax": True, "ref": True}
        raise KeyError
    assert dict(nnx.var_defaults()) == {"hijax": False, "ref": False}


def test_flags_are_the_defaults_of_the_defaults():
    nnx.config.update("flax_array_ref", True)
    try:
        assert nnx.var_defaults().ref is True
    finally:
        nnx.config.update("flax_array_ref", False)
