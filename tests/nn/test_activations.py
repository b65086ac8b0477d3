"""Activations are those of JAX; PReLU learns its slope."""

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest

import graftree as nnx
from graftree.nn import activations


@pytest.mark.parametrize("name", sorted(set(activations.__all__) - {"PReLU", "tanh"}))
def test_activations_are_those_of_jax(name):
    assert getattr(nnx, name) is getattr(jax.nn, name)


def test_tanh_is_that_of_jax_numpy_and_synonyms_are_one_object():
    assert nnx.tanh is jnp.tanh
    assert nnx.swish is nnx.silu
    assert nnx.hard_swish is nnx.hard_silu


def test_prelu_scales_what_is_negative():
    y = nnx.PReLU(0.25)(jnp.array([-8.0, -0.0, 3.0]))
    np.testing.assert_array_equal(y, [-2.0, 0.0, 3.0])


def test_prelu_slope_is_a_scalar_param_of_param_dtype():
    layer = nnx.PReLU(
        0.5, param_dtype=jnp.bfloat16, negative_slope_metadata={"tag": "slope"}
    )
    assert layer.negative_slope.shape == ()
    assert layer.negative_slope[...].dtype == jnp.bfloat16
    assert layer.negative_slope.tag == "slope"


def test_prelu_takes_no_rngs():
    with pytest.raises(TypeError, match="rngs"):
        nnx.PReLU(rngs=nnx.Rngs(0))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_prelu_output_has_the_dtype_of_its_inputs(dtype):
    assert nnx.PReLU()(jnp.ones(2, dtype)).dtype == dtype


def test_prelu_dtype_and_its_hook_decide_if_given():
    seen = []

    def promote(args, *, dtype):
        seen.append((len(args), dtype))
        return args

    layer = nnx.PReLU(dtype=jnp.float16, promote_dtype=promote)
    assert layer(jnp.ones(2, jnp.float16)).dtype == jnp.float32
    assert seen == [(2, jnp.float16)]
    assert nnx.PReLU(dtype=jnp.float16)(jnp.ones(2)).dtype == jnp.float16


def test_prelu_takes_lists_and_refuses_what_is_no_number():
    np.testing.assert_array_equal(nnx.PReLU(0.5)([-4.0, 2.0]), [-2.0, 2.0])
    with pytest.raises(TypeError, match="not a valid JAX array type"):
        nnx.PReLU()("x")


def test_prelu_refuses_an_integer_dtype_at_the_call():
    with pytest.raises(ValueError, match="Dtype must be inexact"):
        nnx.PReLU(dtype=jnp.int32)(jnp.ones(2))


@pytest.mark.usefixtures("float64")
def test_prelu_gradients_equal_finite_differences():
    graphdef, state = nnx.split(nnx.PReLU(0.25, param_dtype=jnp.float64))

    def loss(state, x):
        return jnp.sin(nnx.merge(graphdef, state)(x)).sum()

    args = (state, jnp.array([-3.0, 2.0, -1.0]))
    jax.test_util.check_grads(loss, args, order=1, modes=["rev"])


def test_prelu_is_a_pytree_for_jax_grad():
    layer = nnx.PReLU(0.25)
    x = jnp.array([-3.0, 2.0, -1.0])
    value, grads = jax.jit(jax.value_and_grad(lambda m: m(x).sum()))(layer)
    assert value == 1.0
    assert grads.negative_slope[...] == -4.0


@pytest.mark.peers
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_prelu_equals_the_peer(peer, dtype):
    x = jnp.linspace(-2, 2, 7)
    np.testing.assert_array_equal(
        nnx.PReLU(0.3, dtype=dtype)(x), peer.PReLU(0.3, dtype=dtype)(x)
    )
