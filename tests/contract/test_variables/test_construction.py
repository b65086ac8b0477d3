"""Variables: how they are made (contract `variables-pytrees-modules`, section 2)."""

import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests.zoo import Kind

PLAIN = {"hijax": False, "ref": False, "eager_sharding": True}


def boxed(value, **fields):
    return nnx.VariableMetadata(value, **fields)


# ----------------------------------------------------------------------- signature


def test_value_is_positional_or_keyword():
    assert nnx.Variable(1).get_value() == 1
    assert nnx.Variable(value=2).get_value() == 2


def test_second_positional_argument_is_a_type_error():
    with pytest.raises(TypeError):
        nnx.Variable(1, 2)


def test_value_is_required():
    with pytest.raises(TypeError):
        nnx.Variable()


def test_variable_types_can_be_subscripted():
    assert type(nnx.Param[jax.Array](jnp.ones(2))) is nnx.Param
    assert nnx.Variable[int] is not None


@pytest.mark.parametrize(
    "value",
    [
        jnp.ones(2),
        np.ones(2),
        3,
        2.5,
        None,
        "text",
        {"a": jnp.ones(2)},
        [1, 2],
        (1, "x"),
        len,
        jax.ShapeDtypeStruct((2,), jnp.float32),
        nnx.Param(1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_value_is_stored_as_it_is(value):
    assert nnx.Variable(value).get_raw_value() is value


def test_numpy_buffer_of_the_caller_is_written_through():
    buffer = np.zeros(2)
    nnx.Variable(buffer)[0] = 1.0
    assert buffer.tolist() == [1.0, 0.0]


def test_dict_of_the_caller_is_written_through():
    mapping = {"a": 1}
    nnx.Variable(mapping)["a"] = 2
    assert mapping == {"a": 2}


# ------------------------------------------------------------------------ metadata


def test_metadata_of_a_plain_variable_is_the_three_required_entries():
    assert nnx.Param(jnp.ones(2)).get_metadata() == PLAIN


def test_required_metadata_is_a_class_attribute():
    required = frozenset({"hijax", "ref", "eager_sharding"})
    assert nnx.Variable.required_metadata == required


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
    variable = nnx.Param(boxed(1, metadata={"tag": "boxed", "b": 2}), tag="kw", a=1)
    assert variable.get_metadata(exclude_required=True) == {
        "tag": "boxed",
        "a": 1,
        "b": 2,
    }
    assert variable.get_raw_value() == 1


@pytest.mark.parametrize("key", ["hijax", "ref", "eager_sharding"])
def test_boxed_flags_are_taken(key):
    value = key != "eager_sharding"
    variable = nnx.Param(boxed(jnp.ones(2), metadata={key: value}))
    assert variable.get_metadata(key) is value


@pytest.mark.parametrize("key", ["hijax", "ref", "eager_sharding"])
def test_boxed_flag_that_contradicts_the_argument_is_named(key):
    with pytest.raises(ValueError, match=key):
        nnx.Param(boxed(jnp.ones(2), metadata={key: True}), **{key: False})


def test_equal_boxed_flag_and_argument_are_accepted():
    assert nnx.Param(boxed(jnp.ones(2), metadata={"ref": True}), ref=True).ref


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


def test_no_warning_without_hooks():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nnx.Param(jnp.ones(2), tag="x")


# ------------------------------------------------------------------ object protocol


def test_instances_have_no_dict():
    assert not hasattr(nnx.Param(1), "__dict__")
    assert not hasattr(Kind(1), "__dict__")


def test_unknown_attribute_is_refused_with_the_way_out():
    with pytest.raises(AttributeError, match=r"set_metadata\(tag="):
        nnx.Param(1).tag = "x"


def test_deleting_an_attribute_is_refused_with_the_way_out():
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


def test_class_is_told_by_type_and_var_type():
    variable = Kind(1)
    assert type(variable) is variable.var_type is variable.type is Kind


def test_subclass_is_a_pytree():
    assert jax.tree.leaves(Kind(jnp.array(3.0))) == [3.0]


def test_variables_are_not_hashable():
    with pytest.raises(TypeError):
        hash(nnx.Param(1))


def test_variables_can_be_referred_to_weakly():
    variable = nnx.Param(1)
    assert weakref.ref(variable)() is variable
