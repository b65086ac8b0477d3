"""What the rest of the package asks of Variables; the contract tests have the API."""

import copy

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree.core import stamps
from graftree.core.imprints import HashableMapping
from graftree.core.variables import variables

TraceContextError = nnx.errors.TraceContextError


def test_subclasses_have_no_dict_and_are_registered():
    class Kind(nnx.Param):
        pass

    assert Kind.__slots__ == () and jax.tree.leaves(Kind(1)) == [1]


def test_rebuilding_shares_the_parts():
    value = jnp.ones(2)
    first = nnx.Param(value, tag="x")
    second = variables.rebuild(nnx.Cache, value, variables.metadata_of(first))
    assert type(second) is nnx.Cache and second[...] is value and second.tag == "x"
    assert variables.metadata_of(second) is variables.metadata_of(first)


def test_ownership_is_that_of_the_making_trace():
    plain, backed = nnx.Param(1), nnx.Param(jnp.array(1), ref=True)
    seen = []
    jax.jit(lambda: seen.extend(map(variables.is_owned, (plain, backed))))()
    assert seen == [False, True]
    assert variables.is_owned(plain) and variables.is_owned(backed)


def test_deep_copy_of_a_variable_that_contains_itself_ends():
    variable = nnx.Variable([1])
    variable.get_raw_value().append(variable)
    copied = copy.deepcopy(variable)
    assert copied.get_raw_value()[1] is copied


def test_read_only_variables_refuse_writes():
    variable = nnx.Param(jnp.ones(2)).copy(mutable=False)
    for write in (
        lambda: variable.set_value(1),
        lambda: variable.__setitem__(0, 1.0),
        lambda: variable.set_raw_value(1),
    ):
        with pytest.raises(nnx.errors.ImmutableVariableError, match="Param"):
            write()
    assert variable[...].tolist() == [1.0, 1.0]


def test_half_made_variables_have_no_attributes():
    with pytest.raises(AttributeError):
        object.__new__(nnx.Param)._raw_value


def array_variable():
    return nnx.Variable(jnp.zeros(2))


def ref_variable():
    return nnx.Variable(jnp.zeros(2), ref=True)


def abstract_variable():
    return nnx.Variable(jax.ShapeDtypeStruct((2,), jnp.float32), ref=True)


def new_ref():
    return jax.new_ref(jnp.ones(2))


@pytest.mark.parametrize(
    ("make", "write"),
    [
        (array_variable, lambda v: v.set_raw_value(new_ref())),
        (array_variable, lambda v: v.set_value(new_ref())),
        (ref_variable, lambda v: v.set_raw_value(new_ref())),
        (ref_variable, lambda v: v.set_raw_value(jnp.ones(2))),
        (ref_variable, lambda v: v.copy_from(ref_variable())),
        (abstract_variable, lambda v: variables.store(v, jnp.ones(2))),
        (abstract_variable, lambda v: v.update_from_state(array_variable())),
    ],
)
def test_which_ref_is_held_is_structure(make, write):
    variable = make()
    before = variables.stamp_of(variable)
    write(variable)
    assert variables.stamp_of(variable) > before


@pytest.mark.parametrize("make", [array_variable, ref_variable])
@pytest.mark.parametrize(
    "write",
    [
        lambda v: v.set_raw_value(v.get_raw_value()),
        lambda v: v.set_value(jnp.ones(2)),
        lambda v: v.set_value(1.0, index=0),
        lambda v: variables.store(v, jnp.ones(2)),
        lambda v: v.update_from_state(array_variable()),
        lambda v: v.update_from_state(ref_variable()),
    ],
)
def test_another_value_is_no_structure(make, write):
    variable = make()
    before = variables.stamp_of(variable), stamps.clock.now
    write(variable)
    assert variables.stamp_of(variable) == before[0]
    assert stamps.clock.now == before[1]


def test_plain_variables_share_one_mapping():
    first, second = nnx.Param(jnp.ones(2)), nnx.BatchStat(jnp.ones(3))
    assert variables.metadata_of(first) is variables.metadata_of(second)


def test_replacing_metadata_moves_the_stamp_and_leaves_other_variables_alone():
    first, second = nnx.Param(1), nnx.Param(1)
    before = variables.stamp_of(first)
    variables.replace_metadata(
        first, HashableMapping({**variables.metadata_of(first), "tag": "x"})
    )
    assert variables.stamp_of(first) > before
    assert first.tag == "x"
    assert not second.has_metadata("tag")


def test_metadata_of_read_only_variables_may_change():
    variable = nnx.with_vars(nnx.Param(1), mutable=False)
    assert variables.is_read_only(variable)
    variable.set_metadata(tag="x")
    assert variable.tag == "x" and variables.is_read_only(variable)


def test_entry_mutable_is_false_or_says_nothing():
    assert not variables.is_read_only(nnx.Param(1))
    assert not variables.is_read_only(nnx.Param(1, mutable=True))
    assert variables.is_read_only(nnx.Param(1, mutable=False))
