"""What layers demand of their inputs, and how errors name the layer."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from graftree.nn.support import checks


class Layer:
    """Stands for a layer; its name is in the messages."""

    axis = (0, -3)


def test_arrays_pass_as_they_are():
    for x in (jnp.ones(2), jnp.ones(2, bool), jnp.ones(2, jnp.bfloat16)):
        assert checks.as_array(Layer(), x) is x
    assert jax.jit(lambda x: checks.as_array(Layer(), x) + 1)(1.0) == 2.0


@pytest.mark.parametrize(
    "inputs", [[1.0, 2.0], (1.0, 2.0), np.array([1.0, 2.0], np.float32)]
)
def test_what_jax_makes_an_array_of_becomes_one(inputs):
    x = checks.as_array(Layer(), inputs)
    assert isinstance(x, jax.Array)
    assert (x.tolist(), x.dtype) == ([1.0, 2.0], jnp.float32)


def test_variables_and_lists_of_tracers_become_arrays():
    assert checks.as_array(Layer(), nnx.Param(jnp.ones(2))).shape == (2,)
    assert jax.jit(lambda x: checks.as_array(Layer(), [x, x]))(1.0).shape == (2,)


def test_objects_with_a_shape_that_jax_does_not_know_are_left_to_the_hooks():
    quantized = types.SimpleNamespace(shape=(2, 3))
    assert checks.as_array(Layer(), quantized) is quantized


@pytest.mark.parametrize(
    ("inputs", "described"),
    [
        (None, "NoneType"),
        ("text", "str"),
        (object(), "object"),
        ({"a": 1.0}, "dict"),
        (np.array(["a", "b"]), r"<U1\[2\]"),
        (jax.random.key(0), r"key<fry>\[\]"),
    ],
)
def test_what_is_no_number_is_refused(inputs, described):
    message = f"(?s)Layer needs an array of numbers.*inputs: {described}"
    with pytest.raises(TypeError, match=message):
        checks.as_array(Layer(), inputs)


def test_axes_are_those_of_the_attribute():
    assert checks.axes(Layer(), "axis", jnp.ones((2, 3, 4, 5))) == (0, 1)


@pytest.mark.parametrize("error", [ValueError, IndexError])
def test_axes_that_do_not_exist_are_named(error):
    message = r"(?s)Layer with axis=\(0, -3\): axis -3 is out of bounds.*float32\[2\]"
    with pytest.raises(error, match=message):
        checks.axes(Layer(), "axis", jnp.ones(2))


def test_arrays_are_described_by_dtype_and_shape():
    assert checks.describe(jnp.ones((2, 3), jnp.bfloat16)) == "bfloat16[2, 3]"
    assert checks.describe(np.ones((), int)) == "int64[]"
    assert checks.describe([1.0]) == "list"


@pytest.mark.parametrize("given", [True, False])
def test_the_argument_of_a_call_goes_before_the_attribute(given):
    layer = nnx.Dropout(0.5, deterministic=not given)
    assert checks.setting(layer, "deterministic", given) is given
    assert checks.setting(layer, "deterministic", None) is not given


def test_a_setting_that_nobody_gave_is_an_error_with_the_ways_out():
    layer = nnx.Dropout(0.5, deterministic=None)
    with pytest.raises(ValueError, match="No `deterministic` argument") as error:
        checks.setting(layer, "deterministic", None)
    for way in ("Dropout(..., deterministic=", "layer(x, deter", "nnx.view(model, d"):
        assert way in str(error.value)
