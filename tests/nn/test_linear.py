"""Linear against NumPy in float64: values, dtypes, hooks, sharding."""

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


def test_initial_values_are_the_published_ones():
    kernel = nnx.Linear(2, 3, rngs=nnx.Rngs(0)).kernel[...]
    first = [0.7567299, -0.6857005, -0.5688337, -0.8757605]
    np.testing.assert_allclose(kernel.ravel()[:4], first, rtol=1e-6)
    np.testing.assert_allclose(kernel.sum(), -1.5841567, rtol=1e-6)


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


def test_wrong_number_of_features_is_a_type_error():
    with pytest.raises(TypeError, match="Linear.*contracting dimensions"):
        nnx.Linear(2, 3, rngs=nnx.Rngs(0))(jnp.ones((1, 4)))


def test_rngs_are_required():
    with pytest.raises(TypeError, match="rngs"):
        nnx.Linear(2, 3)


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


def test_preferred_element_type_decides_the_output_dtype():
    layer = nnx.Linear(
        2,
        3,
        use_bias=False,
        dtype=jnp.bfloat16,
        preferred_element_type=jnp.float32,
        rngs=nnx.Rngs(0),
    )
    assert layer(jnp.ones((1, 2))).dtype == jnp.float32


def test_integer_dtype_is_refused_at_the_call():
    layer = nnx.Linear(2, 3, dtype=jnp.int32, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="Dtype must be inexact"):
        layer(jnp.ones((1, 2)))


def test_contraction_gets_only_the_keywords_that_are_set():
    calls = []

    def dot_general(*args, **kwargs):
        calls.append((args[2], kwargs))
        return jax.lax.dot_general(*args, **kwargs)

    layer = nnx.Linear(2, 3, dot_general=dot_general, rngs=nnx.Rngs(0))
    layer(jnp.ones((4, 5, 2)))
    assert calls.pop() == ((((2,), (0,)), ((), ())), {"precision": None})
    layer.precision, layer.preferred_element_type = "highest", jnp.float32
    layer(jnp.ones((4, 5, 2)))
    assert calls.pop()[1] == {
        "precision": "highest",
        "preferred_element_type": jnp.float32,
    }


def test_promotion_hook_gets_a_tuple_with_none_for_what_is_absent():
    seen = []

    def promote(args, **kwargs):
        seen.append(([x if x is None else x.shape for x in args], kwargs))
        return args

    layer = nnx.Linear(2, 3, use_bias=False, promote_dtype=promote, rngs=nnx.Rngs(0))
    layer(jnp.ones((4, 2)))
    assert seen == [([(4, 2), (2, 3), None], {"dtype": None})]


def test_bias_may_be_assigned_later_and_removed():
    layer = nnx.Linear(2, 3, use_bias=False, rngs=nnx.Rngs(0))
    x = jnp.ones((1, 2))
    plain = layer(x)
    layer.bias = nnx.Param(jnp.full(3, 2.0))
    np.testing.assert_array_equal(layer(x), plain + 2.0)
    layer.bias = None
    np.testing.assert_array_equal(layer(x), plain)


def test_metadata_reaches_the_params():
    layer = nnx.Linear(
        2, 3, kernel_metadata={"a": 1}, bias_metadata={"b": 2}, rngs=nnx.Rngs(0)
    )
    assert (layer.kernel.a, layer.bias.b) == (1, 2)


def test_out_sharding_shards_the_result():
    explicit = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((4,), ("x",), axis_types=explicit)
    layer = nnx.Linear(2, 8, rngs=nnx.Rngs(0))
    with jax.set_mesh(mesh):
        x = jnp.ones((3, 2))
        spec = jax.sharding.PartitionSpec(None, "x")
        y = jax.jit(lambda m, x: m(x, out_sharding=spec))(layer, x)
        assert jax.typeof(y).sharding.spec == spec
        assert jax.typeof(layer(x)).sharding.is_fully_replicated


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
