"""Variables: how they are made, copied and replaced.

Contract `variables-pytrees-modules`, sections 2 and 5.
"""

import copy
import pickle
import weakref

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests.zoo import Kind


def boxed(value, **entries):
    return nnx.VariableMetadata(value, metadata=entries)


def tagged(value=None, **entries):
    value = jnp.ones(2) if value is None else value
    return nnx.Param(value, tag="x", **entries)


# ----------------------------------------------------------------------- signature


def test_value_is_positional_or_keyword():
    assert nnx.Variable(1).get_value() == 1
    assert nnx.Variable(value=2).get_value() == 2


@pytest.mark.parametrize("args", [(), (1, 2)], ids=["none", "two"])
def test_one_value_is_required(args):
    with pytest.raises(TypeError):
        nnx.Variable(*args)


def test_variable_types_can_be_subscripted():
    assert type(nnx.Param[jax.Array](jnp.ones(2))) is nnx.Param
    assert nnx.Variable[int] is not None


VALUES = [
    *(jnp.ones(2), np.ones(2), 3, 2.5, None, "text", {"a": jnp.ones(2)}, [1, 2]),
    *((1, "x"), len, jax.ShapeDtypeStruct((2,), jnp.float32), nnx.Param(1)),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_any_value_is_stored_as_it_is(value):
    assert nnx.Variable(value).get_raw_value() is value


def test_buffers_and_dicts_of_the_caller_are_written_through():
    buffer, mapping = np.zeros(2), {"a": 1}
    nnx.Variable(buffer)[0] = 1.0
    nnx.Variable(mapping)["a"] = 2
    assert buffer.tolist() == [1.0, 0.0] and mapping == {"a": 2}


# ------------------------------------------------------------------------ metadata


def test_metadata_of_a_plain_variable_is_the_three_required_entries():
    plain = {"hijax": False, "ref": False, "eager_sharding": True}
    assert nnx.Param(jnp.ones(2)).get_metadata() == plain
    assert nnx.Variable.required_metadata == frozenset(plain)


def test_user_metadata_comes_before_the_required_entries():
    entries = nnx.Param(1, b=1, a=2).get_metadata()
    assert list(entries) == ["b", "a", "hijax", "ref", "eager_sharding"]


def test_hooks_of_the_class_come_last():
    class Doubled(nnx.Variable):
        def on_get_value(self, value):
            return 2 * value

    with pytest.warns(UserWarning, match="(?i)hooks"):
        variable = Doubled(3, tag="x")
    assert list(variable.get_metadata())[-1] == "on_get_value"
    assert variable.get_metadata("on_get_value") is Doubled.on_get_value


@pytest.mark.parametrize("old", ["sharding", "sharding_names"])
def test_old_metadata_names_become_out_sharding(old):
    with pytest.warns(DeprecationWarning, match=old):
        variable = nnx.Param(jnp.ones(2), eager_sharding=False, **{old: ("x",)})
    assert variable.get_metadata("out_sharding") == ("x",)
    assert not variable.has_metadata(old)


def test_boxed_metadata_wins_over_keywords():
    variable = nnx.Param(boxed(1, tag="boxed", b=2), tag="kw", a=1)
    entries = variable.get_metadata(exclude_required=True)
    assert entries == {"tag": "boxed", "a": 1, "b": 2}
    assert variable.get_raw_value() == 1


@pytest.mark.parametrize("key", ["hijax", "ref", "eager_sharding"])
def test_boxed_flags_are_taken(key):
    value = key != "eager_sharding"
    variable = nnx.Param(boxed(jnp.ones(2), **{key: value}))
    assert variable.get_metadata(key) is value


@pytest.mark.parametrize("key", ["hijax", "ref", "eager_sharding"])
def test_boxed_flag_that_contradicts_the_argument_is_named(key):
    with pytest.raises(ValueError, match=key):
        nnx.Param(boxed(jnp.ones(2), **{key: True}), **{key: False})


def test_equal_boxed_flag_and_argument_are_accepted():
    assert nnx.Param(boxed(jnp.ones(2), ref=True), ref=True).ref


# ---------------------------------------------------------------- order of the steps


def test_create_hooks_run_before_create_value():
    class Traced(nnx.Variable):
        def create_value(self, value):
            return (*value, "create_value")

    with pytest.warns(UserWarning, match="(?i)hooks"):
        variable = Traced((), on_create_value=lambda variable, value: (*value, "hook"))
    assert variable.get_raw_value() == ("hook", "create_value")


def test_value_is_made_before_it_is_put_into_a_ref():
    class Halved(nnx.Variable):
        def create_value(self, value):
            return value / 2

    variable = Halved(jnp.array([2.0, 4.0]), ref=True)
    assert isinstance(variable.get_raw_value(), jax.Ref)
    assert variable[...].tolist() == [1.0, 2.0]


def test_shape_is_not_put_into_a_ref():
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert nnx.Param(shape, ref=True).get_raw_value() is shape


# ------------------------------------------------------------------ object protocol


def test_instances_have_no_dict():
    assert not hasattr(nnx.Param(1), "__dict__")
    assert not hasattr(Kind(1), "__dict__")


def test_writing_and_deleting_attributes_is_refused_with_the_way_out():
    with pytest.raises(AttributeError, match=r"set_metadata\(tag="):
        nnx.Param(1).tag = "x"
    with pytest.raises(AttributeError, match="del_metadata"):
        del nnx.Param(1, tag="x").tag


def test_extras_of_a_subclass_go_through_super():
    class Scaled(nnx.Variable):
        def __init__(self, value, scale):
            super().__init__(value, scale=scale)

    assert Scaled(1, 3).scale == 3


def test_property_with_setter_works():
    class Boxed(nnx.Variable):
        @property
        def doubled(self):
            return 2 * self.get_value()

        @doubled.setter
        def doubled(self, value):
            self.set_value(value // 2)

    variable = Boxed(3)
    variable.doubled = 10
    assert (variable.doubled, variable.get_value()) == (10, 5)


def test_slots_of_a_subclass_are_not_part_of_the_pytree():
    class Slotted(nnx.Variable):
        __slots__ = ("extra",)

    variable = Slotted(1)
    variable.extra = "x"
    assert variable.extra == "x"
    assert not hasattr(jax.tree.map(lambda x: x, variable), "extra")
    assert not hasattr(variable.copy(), "extra")


def test_subclasses_are_pytrees_that_know_their_type():
    variable = Kind(jnp.array(3.0))
    assert type(variable) is variable.var_type is variable.type is Kind
    assert jax.tree.leaves(variable) == [3.0]


def test_variables_are_not_hashable_but_can_be_referred_to_weakly():
    variable = nnx.Param(1)
    with pytest.raises(TypeError):
        hash(variable)
    assert weakref.ref(variable)() is variable


# ---------------------------------------------------------------------------- copy


@pytest.mark.parametrize("name", ["copy", "replace", "to_state"])
def test_copy_shares_arrays_and_keeps_class_and_metadata(name):
    variable = tagged()
    other = getattr(variable, name)()
    assert type(other) is nnx.Param and other is not variable
    assert other[...] is variable[...]
    assert other.get_metadata() == variable.get_metadata()


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
    (mine,), (theirs,) = jax.tree.leaves(value), jax.tree.leaves(other)
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
