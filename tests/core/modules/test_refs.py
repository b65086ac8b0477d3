"""Conversions of whole objects; tests/contract/test_refs has the API."""

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree.core.modules import refs


def test_hijax_variables_are_told_by_their_flag():
    variables = [nnx.Param(1, hijax=True), nnx.Param(1)]
    assert [isinstance(v, refs.HijaxVariable) for v in variables] == [True, False]
    matches = nnx.filterlib.to_predicate(refs.HijaxVariable)
    assert [matches((), v) for v in variables] == [True, False]


def test_cyclic_objects_are_converted():
    node = nnx.Dict(w=nnx.Param(jnp.ones(2)))
    node.self = node
    converted = nnx.with_vars(node, ref=True)
    assert converted.self is converted and converted.w.ref


def test_variable_and_bare_attribute_may_hold_the_same_ref():
    w = nnx.Param(jnp.ones(2), ref=True)
    node = nnx.Dict(w=w, bare=w.get_raw_value())
    arrays = nnx.to_arrays(node)
    assert not arrays.w.ref and isinstance(arrays.bare, jax.Array)


def test_shared_bare_refs_stay_one_array():
    ref = jax.new_ref(jnp.ones(2))
    arrays = nnx.to_arrays({"a": ref, "b": ref}, allow_duplicates=True)
    assert arrays["a"] is arrays["b"]


def test_numpy_arrays_stay():
    state = nnx.to_pure_dict(nnx.State({"a": nnx.Param(jnp.ones(2))}))
    state["b"] = jax.device_get(jnp.ones(2))
    assert nnx.to_refs(state)["b"] is state["b"]


def test_values_that_are_no_arrays_are_refused():
    with pytest.raises(TypeError):
        nnx.to_refs(nnx.Dict(a=nnx.Param((1.0, 2.0))))
    converted = nnx.to_refs(nnx.Dict(a=nnx.Cache((1.0,))), only=nnx.Param)
    assert converted.a.get_value() == (1.0,)


def test_the_way_out_of_duplicates_is_given():
    v = nnx.Param(jnp.ones(2))
    with pytest.raises(ValueError, match="allow_duplicates=True"):
        nnx.with_vars([v, v], ref=True)
