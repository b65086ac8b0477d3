"""Variables: copy, replace, update (contract, section 5)."""

import copy
import pickle

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx


def tagged(value=None, **entries):
    value = jnp.ones(2) if value is None else value
    return nnx.Param(value, tag="x", **entries)


# ---------------------------------------------------------------------------- copy


@pytest.mark.parametrize("name", ["copy", "replace", "to_state"])
def test_copy_shares_arrays_and_keeps_class_and_metadata(name):
    variable = tagged()
    other = getattr(variable, name)()
    assert type(other) is nnx.Param and other is not variable
    assert (
        other[...] is variable[...] and other.get_metadata() == variable.get_metadata()
    )


def test_copy_takes_a_value_and_metadata():
    variable = tagged().replace(value=3, tag="y", other=1)
    assert variable.get_value() == 3
    assert variable.get_metadata(exclude_required=True) == {"tag": "y", "other": 1}
    assert tagged().replace(4).get_value() == 4


def test_metadata_of_a_copy_is_its_own():
    variable = tagged()
    variable.copy().set_metadata(tag="y")
    assert variable.tag == "x"


def test_containers_are_rebuilt():
    variable = nnx.Variable({"a": [1]})
    variable.copy().get_raw_value()["a"].append(2)
    assert variable.get_value() == {"a": [1]}


def test_raw_value_is_refused():
    with pytest.raises(TypeError, match="raw_value"):
        tagged().copy(raw_value=1)


def test_copy_runs_neither_hooks_nor_create_value_nor_placement():
    class Loud(nnx.Variable):
        def create_value(self, value):
            calls.append("create")
            return value

    calls = []
    variable = Loud(jnp.ones(2))
    variable.copy(out_sharding=("x",))
    variable.copy(on_create_value=lambda variable, value: calls.append("hook"))
    assert calls == ["create"]


def test_variable_as_new_value_is_nested():
    inner = nnx.Param(1)
    assert tagged().copy(inner).get_raw_value() is inner


def test_copy_belongs_to_the_trace_that_makes_it():
    variable = tagged()

    @jax.jit
    def f():
        other = variable.copy()
        other[...] += 1
        return other[...]

    assert f().tolist() == [2.0, 2.0] and variable[...].tolist() == [1.0, 1.0]


# ---------------------------------------------------------------------------- refs


def test_copy_of_a_ref_reads_it_into_a_new_one():
    variable = tagged(ref=True)
    other = variable.copy()
    other[...] += 1
    assert isinstance(other.get_raw_value(), jax.Ref)
    assert variable[...].tolist() == [1.0, 1.0] and other[...].tolist() == [2.0, 2.0]


def test_ref_can_be_shared_by_a_copy():
    variable = tagged(ref=True)
    assert variable.copy(_copy_ref=False).get_raw_value() is variable.get_raw_value()


def test_copy_converts_between_refs_and_arrays():
    plain = tagged(ref=True).copy(ref=False)
    assert isinstance(plain.get_raw_value(), jax.Array) and plain.ref is False
    backed = tagged().copy(ref=True)
    assert isinstance(backed.get_raw_value(), jax.Ref) and backed.ref is True


# ------------------------------------------------------------------- from_metadata


def test_from_metadata_runs_nothing():
    class Loud(nnx.Variable):
        def __init__(self, value):
            raise AssertionError("not called")

        def create_value(self, value):
            raise AssertionError("not called")

    entries = {"hijax": False, "ref": False, "tag": "x"}
    variable = Loud.from_metadata(3, entries)
    assert type(variable) is Loud and variable.get_value() == 3 and variable.tag == "x"


def test_from_metadata_needs_hijax():
    with pytest.raises(KeyError, match="hijax"):
        nnx.Param.from_metadata(3, {"ref": False})


# ------------------------------------------------------- copy_from, update_from_state


def test_copy_from_takes_value_and_metadata():
    variable, other = tagged(), nnx.Param(jnp.zeros(2), other=1)
    variable.copy_from(other)
    assert variable[...] is other[...]
    assert variable.get_metadata() == other.get_metadata()
    variable.copy_from(variable)
    assert variable[...] is other[...]


def test_copy_from_aliases_a_ref():
    variable, other = tagged(ref=True), tagged(ref=True)
    variable.copy_from(other)
    assert variable.get_raw_value() is other.get_raw_value()


def test_copy_from_another_class_is_refused():
    message = r"incompatible container(.|\n)*Param(.|\n)*BatchStat"
    with pytest.raises(ValueError, match=message):
        tagged().copy_from(nnx.BatchStat(1))


def test_update_from_state_takes_value_and_metadata_of_any_type():
    variable = tagged()
    variable.update_from_state(nnx.BatchStat(jnp.zeros(2), other=1))
    assert variable[...].tolist() == [0.0, 0.0] and type(variable) is nnx.Param
    assert variable.get_metadata(exclude_required=True) == {"other": 1}


def test_plain_variable_stays_plain_when_updated_from_a_ref():
    variable = tagged()
    variable.update_from_state(nnx.Param(jnp.zeros(2), ref=True))
    assert isinstance(variable.get_raw_value(), jax.Array) and variable.ref is False


# --------------------------------------------------------------------- copy module


def test_shallow_copy_shares_the_value_but_not_the_metadata():
    variable = tagged()
    other = copy.copy(variable)
    other.set_metadata(tag="y")
    assert type(other) is nnx.Param and other[...] is variable[...]
    assert variable.tag == "x"


@pytest.mark.parametrize(
    "value", [jnp.ones(2), np.ones(2), {"a": np.ones(2)}], ids=["jax", "numpy", "dict"]
)
def test_deep_copy_is_a_variable_with_a_value_of_its_own(value):
    variable = nnx.Param(value, tag=["x"])
    other = copy.deepcopy(variable)
    assert type(other) is nnx.Param and other.tag == ["x"]
    assert other.tag is not variable.tag
    for mine, theirs in zip(
        jax.tree.leaves(value), jax.tree.leaves(other), strict=True
    ):
        assert mine is not theirs and (mine == theirs).all()


def test_deep_copy_keeps_sharing_with_enclosing_containers():
    variable = tagged()
    first, second = copy.deepcopy([variable, {"a": variable}])
    assert first is second["a"] and first is not variable


# ------------------------------------------------------------------------- pickling


@pytest.mark.parametrize("library", [pickle, cloudpickle])
def test_pickling_keeps_class_value_and_metadata(library):
    variable = tagged()
    other = library.loads(library.dumps(variable))
    assert type(other) is nnx.Param and other[...].tolist() == [1.0, 1.0]
    assert other.get_metadata() == variable.get_metadata()
    assert isinstance(other.get_raw_value(), jax.Array)


def test_loaded_variable_belongs_to_the_trace_that_loads_it():
    text = pickle.dumps(tagged(value=np.ones(2)))

    @jax.jit
    def f():
        variable = pickle.loads(text)
        variable.set_value(jnp.zeros(2))
        return variable.get_value()

    assert f().tolist() == [0.0, 0.0]
