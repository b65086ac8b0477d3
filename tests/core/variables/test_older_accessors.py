"""Accessors of older releases: they work, and warn."""

import jax.numpy as jnp
import pytest

import graftree as nnx


def test_value_reads_and_writes_with_a_warning():
    count = nnx.Variable(jnp.array(1))
    with pytest.warns(DeprecationWarning, match="'.value' access is now deprecated"):
        assert count.value == 1
    with pytest.warns(DeprecationWarning):
        count.value += 2
    assert count[...] == 3


def test_raw_value_reads_and_writes_with_a_warning():
    variable = nnx.Variable("a")
    with pytest.warns(DeprecationWarning):
        variable.raw_value = "b"
    with pytest.warns(DeprecationWarning):
        assert variable.raw_value == "b"


def test_sharding_names_reads_the_annotation():
    with nnx.use_eager_sharding(False):
        variable = nnx.Param(jnp.ones(2), out_sharding=("x",))
    with pytest.warns(DeprecationWarning):
        assert variable.sharding_names == ("x",)
    with pytest.warns(DeprecationWarning):
        assert nnx.Param(1).sharding_names is None


def test_has_ref_says_what_is_stored_and_is_hijax_that_no_write_is_lost():
    flags = [(False, False), (False, True), (True, False), (True, True)]
    made = [nnx.Param(1.0, hijax=hijax, ref=ref) for hijax, ref in flags]
    assert [v.has_ref for v in made] == [False, True, False, True]
    assert [v.is_hijax for v in made] == [False, True, True, True]


def test_value_of_hijax_variables_says_what_to_use():
    with pytest.raises(NotImplementedError, match="get_value"):
        nnx.Param(1.0, hijax=True).value
