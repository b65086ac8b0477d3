"""Many raw values are read at once, and written all or none."""

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree.core.variables import variables

TraceContextError = nnx.errors.TraceContextError


def test_many_are_read_and_written_at_once():
    group = [nnx.Param(1), nnx.Param(jnp.array(2.0), ref=True)]
    ref = group[1].get_raw_value()
    assert variables.read_all(group) == [1, ref]
    variables.write_all(group, [3, jnp.array(4.0)])
    assert group[0].get_raw_value() == 3
    assert group[1].get_raw_value() is ref and ref[...] == 4.0


def test_many_are_written_all_or_none():
    outer = nnx.Param(1)

    @jax.jit
    def f(x):
        inner = nnx.Param(2)
        with pytest.raises(TraceContextError):
            variables.write_all([inner, outer], [x, x])
        return inner.get_raw_value()

    assert f(5.0) == 2 and outer.get_raw_value() == 1


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
        variables.write_all([first, second], [jnp.ones(2), value])
    assert first[...].tolist() == [0.0, 0.0]


def test_a_ref_is_written_by_what_another_ref_holds():
    first, second = nnx.Param(1.0, ref=True), nnx.Param(2.0, ref=True)
    ref = first.get_raw_value()
    variables.write_all([first], [second.get_raw_value()])
    variables.write_all([second], [second.get_raw_value()])
    assert first.get_raw_value() is ref and first[...] == second[...] == 2.0


@pytest.mark.parametrize(
    ("options", "value", "expected"),
    [
        ({}, 2.0, True),
        ({"tag": "a"}, 2.0, True),
        ({"ref": True}, 2.0, False),
        ({"mutable": False}, 2.0, False),
        ({}, jax.new_ref(jnp.ones(2)), False),
    ],
    ids=["plain", "metadata", "in a ref", "read-only", "by a ref"],
)
def test_values_are_replaced_where_neither_refs_nor_checks_play_a_part(
    options, value, expected
):
    group = [nnx.Param(jnp.ones(2)), nnx.Param(jnp.ones(2), **options)]
    assert variables.may_replace_all(group, [1.0, value]) is expected
    assert variables.may_replace_all([], [])


def test_values_of_another_trace_are_not_replaced():
    outer, seen = nnx.Param(1.0), []
    jax.jit(lambda: seen.append(variables.may_replace_all([outer], [2.0])))()
    assert seen == [False]
