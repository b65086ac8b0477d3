"""What layers are given: inputs, settings, sizes, axes and padding."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from graftree.nn.support import arguments


def test_arrays_pass_as_they_are():
    for x in (jnp.ones(2), jnp.ones(2, bool), jnp.ones(2, jnp.bfloat16)):
        assert arguments.as_array(x) is x
    assert jax.jit(lambda x: arguments.as_array(x) + 1)(1.0) == 2.0


@pytest.mark.parametrize(
    "inputs", [[1.0, 2.0], (1.0, 2.0), np.array([1.0, 2.0], np.float32)]
)
def test_what_jax_makes_an_array_of_becomes_one(inputs):
    x = arguments.as_array(inputs)
    assert isinstance(x, jax.Array)
    assert (x.tolist(), x.dtype) == ([1.0, 2.0], jnp.float32)


def test_variables_and_lists_of_tracers_become_arrays():
    assert arguments.as_array(nnx.Param(jnp.ones(2))).shape == (2,)
    assert jax.jit(lambda x: arguments.as_array([x, x]))(1.0).shape == (2,)


def test_objects_with_a_shape_that_jax_does_not_know_are_left_to_the_hooks():
    quantized = types.SimpleNamespace(shape=(2, 3))
    assert arguments.as_array(quantized) is quantized


@pytest.mark.parametrize("inputs", [None, "text", object(), {"a": 1.0}, [[1], [2, 3]]])
def test_what_jax_makes_no_array_of_is_refused(inputs):
    with pytest.raises((TypeError, ValueError)):
        arguments.as_array(inputs)


@pytest.mark.parametrize("given", [True, False])
def test_the_argument_of_a_call_goes_before_the_attribute(given):
    layer = nnx.Dropout(0.5, deterministic=not given)
    assert arguments.setting(layer, "deterministic", given) is given
    assert arguments.setting(layer, "deterministic", None) is not given


def test_a_setting_that_nobody_gave_is_an_error_with_the_ways_out():
    layer = nnx.Dropout(0.5, deterministic=None)
    with pytest.raises(ValueError, match="No `deterministic` argument") as error:
        arguments.setting(layer, "deterministic", None)
    for way in ("Dropout(..., deterministic=", "layer(x, deter", "nnx.view(model, d"):
        assert way in str(error.value)


@pytest.mark.parametrize("values", [3, np.int64(3), [3], (3,), np.array([3])])
def test_sizes_takes_ints_and_sequences(values):
    assert arguments.sizes(values) == (3,)
    assert type(arguments.sizes(values)[0]) is int


@pytest.mark.parametrize("values", ["ab", 1.5, [1.5]])
def test_sizes_refuses_what_is_no_int(values):
    with pytest.raises(TypeError):
        arguments.sizes(values)


def test_per_axis_repeats_an_int_and_takes_none_for_one():
    assert arguments.per_axis(None, 2) == (1, 1)
    assert arguments.per_axis(np.int64(3), 2) == (3, 3)
    assert arguments.per_axis([3, 4], 2) == (3, 4)


def test_axes_are_made_non_negative_and_sorted():
    assert arguments.canonical_axes((-1, 0, 2), 3) == (0, 2)
    assert arguments.canonical_axes(-2, 3) == (1,)


@pytest.mark.parametrize("error", [ValueError, IndexError])
def test_axes_that_do_not_exist_are_refused(error):
    with pytest.raises(error, match="out of bounds"):
        arguments.canonical_axes((0, 3), 3)


def test_padding_gets_the_forms_of_lax():
    assert arguments.canonicalize_padding("ANY", 2) == "ANY"
    assert arguments.canonicalize_padding(2, 2) == [(2, 2), (2, 2)]
    assert arguments.canonicalize_padding([1, (0, 2)], 2) == [(1, 1), (0, 2)]
    assert arguments.canonicalize_padding(np.ones((2, 2), int), 2) == [(1, 1), (1, 1)]


@pytest.mark.parametrize("padding", [(1, 2, 3), (1, (1, 2, 3)), 1.5, None, ("a", 1)])
def test_unknown_padding_is_named(padding):
    with pytest.raises(ValueError, match="Invalid padding format.*len 2"):
        arguments.canonicalize_padding(padding, 2)


def test_if_set_leaves_out_what_is_none():
    assert arguments.if_set(a=None, b=False, c=1) == {"b": False, "c": 1}
