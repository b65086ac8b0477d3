"""What the rest of the package asks of Variables; the contract tests have the API."""

import copy

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree.core import labels, variables

TraceContextError = nnx.errors.TraceContextError


def test_subclasses_have_no_dict_and_are_registered():
    class Kind(nnx.Param):
        pass

    assert Kind.__slots__ == () and jax.tree.leaves(Kind(1)) == [1]


def test_rebuilding_shares_the_parts():
    value = jnp.ones(2)
    first = nnx.Param(value, tag="x")
    second = variables.rebuild(nnx.Cache, value, labels.metadata_of(first))
    assert type(second) is nnx.Cache and second[...] is value and second.tag == "x"
    assert labels.metadata_of(second) is labels.metadata_of(first)


def test_many_are_read_and_written_at_once():
    group = [nnx.Param(1), nnx.Param(jnp.array(2.0), ref=True)]
    ref = group[1].get_raw_value()
    assert variables.read_raw(group) == [1, ref]
    variables.write_raw(group, [3, jnp.array(4.0)])
    assert group[0].get_raw_value() == 3
    assert group[1].get_raw_value() is ref and ref[...] == 4.0


def test_many_are_written_all_or_none():
    outer = nnx.Param(1)

    @jax.jit
    def f(x):
        inner = nnx.Param(2)
        with pytest.raises(TraceContextError):
            variables.write_raw([inner, outer], [x, x])
        return inner.get_raw_value()

    assert f(5.0) == 2 and outer.get_raw_value() == 1


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


@pytest.mark.parametrize(
    ("second", "value"),
    [
        (nnx.Param(jnp.ones(2), ref=True), jnp.ones(3)),
        (nnx.Param(jnp.ones(2), mutable=False), jnp.ones(2)),
    ],
    ids=["wrong shape", "read-only"],
)
def test_nothing_is_written_if_one_value_can_not_be(second, value):
    first = nnx.Param(jnp.zeros(2))
    with pytest.raises((ValueError, nnx.errors.ImmutableVariableError)):
        variables.write_raw([first, second], [jnp.ones(2), value])
    assert first[...].tolist() == [0.0, 0.0]


def test_a_ref_is_written_by_what_another_ref_holds():
    first, second = nnx.Param(1.0, ref=True), nnx.Param(2.0, ref=True)
    ref = first.get_raw_value()
    variables.write_raw([first], [second.get_raw_value()])
    variables.write_raw([second], [second.get_raw_value()])
    assert first.get_raw_value() is ref and first[...] == second[...] == 2.0


def test_half_made_variables_have_no_attributes():
    with pytest.raises(AttributeError):
        object.__new__(nnx.Param)._value
