"""Activations and initializers are those of JAX; PReLU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx

INITIALIZERS = {n for n in dir(jax.nn.initializers) if not n.startswith("_")}
ACTIVATIONS = {*dir(nnx.nn.activations)} & {n for n in dir(jax.nn) if n[0] != "_"}


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations_are_those_of_jax(name):
    assert getattr(nnx, name) is getattr(jax.nn, name)


@pytest.mark.parametrize("name", sorted(INITIALIZERS - {"Initializer"}))
def test_initializers_are_those_of_jax(name):
    assert getattr(nnx.initializers, name) is getattr(jax.nn.initializers, name)
    assert name in nnx.initializers.__all__


def test_tanh_is_that_of_jax_numpy_and_synonyms_are_one_object():
    assert nnx.tanh is jnp.tanh and nnx.swish is nnx.silu
    assert nnx.hard_swish is nnx.hard_silu


def test_prelu_scales_what_is_negative():
    y = nnx.PReLU(0.25)(jnp.array([-8.0, -0.0, 3.0]))
    np.testing.assert_array_equal(y, [-2.0, 0.0, 3.0])


def test_prelu_slope_is_a_scalar_param_of_param_dtype():
    metadata = {"negative_slope_metadata": {"tag": "slope"}}
    slope = nnx.PReLU(0.5, param_dtype=jnp.bfloat16, **metadata).negative_slope
    assert (slope.shape, slope[...].dtype, slope.tag) == ((), jnp.bfloat16, "slope")


def test_prelu_takes_no_rngs_and_no_text():
    with pytest.raises(TypeError, match="rngs"):
        nnx.PReLU(rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="not a valid JAX array type"):
        nnx.PReLU()("x")


def test_a_hook_of_prelu_decides_the_dtype():
    layer = nnx.PReLU(dtype=jnp.float16, promote_dtype=lambda args, *, dtype: args)
    assert layer(jnp.ones(2, jnp.float16)).dtype == jnp.float32
