"""Linear against NumPy in float64: values, keys, dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests.random_arrays import random


@pytest.mark.parametrize("batch", [(), (5,), (2, 0), (2, 3, 4)])
def test_linear_is_a_matrix_product_plus_bias(batch):
    layer = nnx.Linear(3, 4, bias_init=nnx.initializers.normal(), rngs=nnx.Rngs(0))
    x = random(*batch, 3)
    kernel, bias = np.float64(layer.kernel[...]), np.float64(layer.bias[...])
    expected = np.float64(x) @ kernel + bias
    assert layer(x).shape == (*batch, 4)
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-6)


def test_kernel_is_drawn_before_bias():
    rngs = nnx.Rngs(params=5)
    layer = nnx.Linear(3, 4, bias_init=nnx.initializers.normal(), rngs=rngs)
    keys = [jax.random.fold_in(jax.random.key(5), n) for n in range(2)]
    kernel = nnx.initializers.lecun_normal()(keys[0], (3, 4), jnp.float32)
    np.testing.assert_array_equal(layer.kernel[...], kernel)
    bias = nnx.initializers.normal()(keys[1], (4,), jnp.float32)
    np.testing.assert_array_equal(layer.bias[...], bias)
    assert rngs.params.count[...] == 2


def test_lists_are_inputs():
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(layer([[1, 2]]), layer(jnp.array([[1.0, 2.0]])))


def test_bias_is_added_to_what_a_contraction_of_the_users_own_gives():
    class Scaled:
        """A product with its scale beside it, as of a quantized kernel."""

        def __init__(self, product):
            self.product, self.ndim = product, product.ndim

        def __add__(self, other):
            return 10 * self.product + other

    def contract(*args, **options):
        return Scaled(jax.lax.dot_general(*args, **options))

    layer = nnx.Linear(3, 4, dot_general=contract, rngs=nnx.Rngs(0))
    layer.bias[...] = jnp.arange(4.0)
    x = random(2, 3)
    expected = 10 * np.float64(x) @ np.float64(layer.kernel[...]) + np.arange(4)
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-6)


def test_wrong_number_of_features_is_a_type_error():
    with pytest.raises(TypeError, match="contracting dimensions.*(?s:.*)at Linear"):
        nnx.Linear(2, 3, rngs=nnx.Rngs(0))(jnp.ones((1, 4)))


@pytest.mark.parametrize(
    ("options", "inputs", "expected"),
    [
        ({}, jnp.float32, jnp.float32),
        ({}, jnp.bfloat16, jnp.float32),
        ({}, jnp.int32, jnp.float32),
        ({"param_dtype": jnp.bfloat16}, jnp.bfloat16, jnp.bfloat16),
        ({"param_dtype": jnp.bfloat16}, jnp.float32, jnp.float32),
        ({"dtype": jnp.bfloat16}, jnp.float32, jnp.bfloat16),
        ({"dtype": "float16"}, jnp.float32, jnp.float16),
        ({"dtype": jnp.complex64}, jnp.float32, jnp.complex64),
    ],
)
def test_output_dtype(options, inputs, expected):
    layer = nnx.Linear(2, 3, **options, rngs=nnx.Rngs(0))
    assert layer(jnp.ones((1, 2), inputs)).dtype == expected


@pytest.mark.peers
@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
def test_linear_equals_the_peer(peer, use_bias, dtype, param_dtype):
    options = {"use_bias": use_bias, "dtype": dtype, "param_dtype": param_dtype}
    ours = nnx.Linear(6, 5, **options, rngs=nnx.Rngs(3))
    theirs = peer.Linear(6, 5, **options, rngs=peer.Rngs(3))
    np.testing.assert_array_equal(ours.kernel[...], theirs.kernel[...])
    x = random(2, 7, 6)
    assert ours(x).dtype == theirs(x).dtype
    np.testing.assert_array_equal(ours(x), theirs(x))
