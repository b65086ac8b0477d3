"""Corners of Variables: values, refs, metadata, operators, defaults, names.

The contract has the rules: tests/contract/test_variables and test_refs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import tables

ImmutableVariableError = nnx.errors.ImmutableVariableError


# ----------------------------------------------------------------------------- values


@tables.cases(
    "value",
    jax.ShapeDtypeStruct((2,), jnp.float32),
    jax.sharding.PartitionSpec("x"),
    jax.sharding.SingleDeviceSharding(jax.devices()[0]),
    ids=lambda value: type(value).__name__,
)
def test_stand_ins_for_arrays_are_never_in_a_ref(value):
    assert nnx.Param(value, ref=True).get_raw_value() is value


def test_older_names_warn_at_the_line_that_has_them():
    variable = nnx.Param(1.0)
    with pytest.warns(DeprecationWarning) as record:
        variable.value = variable.value + 1
        variable.raw_value = variable.raw_value + 1
        assert variable.sharding_names is None and variable.get_value() == 3.0
    assert [warning.filename for warning in record] == [__file__] * 5


def test_a_variable_takes_what_the_ref_of_another_holds():
    first, second = nnx.Param(1.0, ref=True), nnx.Param(2.0, ref=True)
    ref = first.get_raw_value()
    nnx.update(first, second)
    nnx.update(second, second)
    assert first.get_raw_value() is ref and first[...] == second[...] == 2.0
    with pytest.raises(AttributeError):  # of one that is half made
        object.__new__(nnx.Param)._raw_value


STORED = [
    *(jnp.ones(2), jnp.array([1, 2]), jnp.array(True)),
    *(jnp.float32(1), jnp.uint32(1), jnp.bfloat16(1)),
]
GIVEN = [
    *(1, 1.5, True, None, "text", np.float64(2), np.ones(2), jnp.ones(2), jnp.ones(3)),
    *(jnp.ones((1, 2)), jnp.float32(1), jnp.int8(1), jnp.array(1.0), jnp.bfloat16(1)),
    jax.ShapeDtypeStruct((2,), jnp.float32),
]


def is_written(write):
    """Whether JAX writes the value, and doesn't warn."""
    try:
        write()
    except (TypeError, ValueError, FutureWarning):
        return False
    return True


@pytest.mark.parametrize("value", GIVEN, ids=str)
@pytest.mark.parametrize("stored", STORED, ids=lambda x: f"{x.dtype}{list(x.shape)}")
def test_what_fits_a_ref_is_what_fits_an_array(stored, value):
    variable = nnx.Param(stored, ref=True)
    fits = is_written(lambda: stored.at[...].set(value))
    assert is_written(lambda: nnx.update([variable], {0: value})) is fits
    assert fits or (variable[...] == stored).all()


@tables.cases(
    "index",
    *(..., 0, -1, (0, -1), slice(1, None), (..., 0), np.array([0, 2]), (), None),
    *((None, 0), (slice(None), None), (..., None), np.array([True, False, True])),
    *(np.arange(12).reshape(3, 4) > 4, slice(None, None, -1), True),
    (0, slice(3, 0, -1)),
    ids=str,
)
def test_refs_take_every_index_of_arrays(index):
    array = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    variable = nnx.Param(jnp.asarray(array), ref=True)
    np.testing.assert_array_equal(variable[index], array[index])
    variable[index] = -array[index]
    array[index] = -array[index]
    np.testing.assert_array_equal(variable[...], array)


# -------------------------------------------------------------------- all or nothing


@tables.cases(
    "second",
    nnx.Param(jnp.ones(3), ref=True),
    nnx.Param(jnp.ones(2), mutable=False),
    ids=["other shape", "read-only"],
)
def test_nothing_is_written_if_one_value_can_not_be(second):
    first = nnx.Param(jnp.zeros(2))
    with pytest.raises((ValueError, ImmutableVariableError)):
        nnx.update([first, second], {0: jnp.ones(2), 1: jnp.zeros(2)})
    assert not first[...].any() and second[...].all()


def test_nothing_is_written_if_one_variable_is_of_another_trace():
    outer = nnx.Param(1)

    @jax.jit
    def f(x):
        inner = nnx.Param(2)
        with pytest.raises(nnx.errors.TraceContextError):
            nnx.update([inner, outer], {0: x, 1: x})
        return inner.get_raw_value()

    assert f(5.0) == 2 and outer.get_raw_value() == 1


# --------------------------------------------------------------------------- metadata


def test_metadata_of_one_variable_is_not_that_of_another():
    boxed = nnx.VariableMetadata(1, metadata={"ref": False, "tag": "x"})
    first, second = nnx.Param(boxed, a=1), nnx.Param(1)
    assert (first.get_value(), first.tag, first.a) == (1, "x", 1)
    first.set_metadata(tag="y", b=2)
    assert boxed.metadata == {"ref": False, "tag": "x"} and not hasattr(second, "tag")


def test_what_can_not_be_changed_is_told_with_the_way_out():
    with pytest.raises(ValueError, match=r"copy\(ref=True\)"):
        nnx.Param(1.0).set_metadata(ref=True)


def is_written_to(variable):
    try:
        variable.set_value(2)
    except ImmutableVariableError:
        return False
    return True


def test_mutable_is_false_or_says_nothing():
    frozen = nnx.Param(1, mutable=False)
    frozen.set_metadata(tag="x")
    assert frozen.get_metadata("mutable") is False and not is_written_to(frozen)
    thawed = frozen.copy(mutable=True)
    assert not thawed.has_metadata("mutable") and is_written_to(thawed)
    assert is_written_to(nnx.Param(1)) and is_written_to(nnx.Param(1, mutable=True))
    frozen = nnx.with_vars(thawed, mutable=False)
    frozen.set_metadata(tag="y")
    assert frozen.tag == "y" and thawed.tag == "x" and not is_written_to(frozen)


def test_what_says_how_a_variable_is_stored_is_not_taken_over():
    own = nnx.Param(1.0, ref=True, tag="x")
    own.update_from_state(nnx.Param(2.0, hijax=True, mutable=False, tag="y", more=1))
    flags = {"hijax": False, "ref": True, "eager_sharding": True}
    assert own.get_metadata() == {**flags, "tag": "y", "more": 1} and own[...] == 2.0


def test_hashable_mappings_are_read_like_dicts_and_do_not_follow_their_origin():
    given = {"x": 1, "y": 2}
    mapping = nnx.graphlib.HashableMapping(given)
    other = nnx.graphlib.HashableMapping({"y": 2, "x": 1})
    given["x"] = 2
    assert dict(mapping) == {"x": 1, "y": 2} and mapping["x"] == 1
    assert [mapping.get("y"), mapping.get("z"), mapping.get("z", 3)] == [2, None, 3]
    assert mapping == other and hash(mapping) == hash(other)
    assert mapping != nnx.graphlib.HashableMapping({"x": 1}) and mapping != dict(other)
    with pytest.raises(TypeError):
        hash(nnx.graphlib.HashableMapping({"a": []}))


# -------------------------------------------------------------------------- operators


def test_arrays_convert_with_dtype_and_copy_and_leave_operators_to_the_variable():
    buffer = np.ones(2)
    variable = nnx.Param(buffer)
    assert np.asarray(variable, dtype=np.int32).dtype == np.int32
    assert np.array(variable, copy=True) is not buffer
    out = buffer + variable
    assert isinstance(out, np.ndarray) and out.tolist() == [2.0, 2.0]


def test_operators_of_a_class_go_through_its_get_value():
    class Doubled(nnx.Variable):
        def get_value(self, **kwargs):
            return 2 * super().get_value(**kwargs)

    assert (Doubled(3) + 1, 1 - Doubled(3), -Doubled(3)) == (7, -5, -6)


def test_operators_have_names_and_those_refused_name_type_and_symbol():
    for name in ("add", "radd", "matmul", "neg", "len", "iadd", "eq", "divmod"):
        assert getattr(nnx.Variable, f"__{name}__").__name__ == f"__{name}__"
    variable = nnx.BatchStat(1)
    with pytest.raises(NotImplementedError, match=r"(?s)\*\*=.*BatchStat"):
        variable **= 2
    assert f"{variable}" == str(variable)


# ------------------------------------------------------------------ defaults and names


def test_defaults_are_set_and_undone_together_and_equal_by_content():
    assert nnx.var_defaults() == nnx.var_defaults()
    with pytest.raises(KeyError), nnx.var_defaults(ref=True, hijax=True):
        assert nnx.var_defaults() == nnx.variablelib.VarDefaults(hijax=True, ref=True)
        assert dict(nnx.var_defaults()) == {"hijax": True, "ref": True}
        raise KeyError
    assert dict(nnx.var_defaults()) == {"hijax": False, "ref": False}
    with nnx.config.temp_flip_flag("flax_array_ref", True):
        assert nnx.var_defaults().ref is True


def test_names_of_types():
    with pytest.raises(ValueError, match=r"(?s)'nope'.*batch_stats.*params"):
        nnx.variable_type_from_name("nope")
    made = nnx.variable_type_from_name("made_without_dict", allow_register=True)
    assert not hasattr(made(1), "__dict__")
    named = type("Named", (nnx.Variable,), {})
    for name in ("named_first", "named_second"):
        nnx.register_variable_name(name, named)
    assert nnx.variable_name_from_type(named) == "named_first"
