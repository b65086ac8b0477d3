"""Embed: look-up, products with all rows, dtypes, sharding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests.random_arrays import random


def test_look_up_gives_the_rows():
    layer = nnx.Embed(5, 3, rngs=nnx.Rngs(0))
    inputs = np.array([[0, 4, 2], [1, 1, 3]])
    expected = np.asarray(layer.embedding[...])[inputs]
    np.testing.assert_array_equal(layer(inputs), expected)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint32, jnp.int32])
def test_any_integers_are_taken(dtype):
    layer = nnx.Embed(5, 3, rngs=nnx.Rngs(0))
    assert layer(jnp.ones((2, 0, 4), dtype)).shape == (2, 0, 4, 3)
    assert layer(jnp.array(1, dtype)).shape == (3,)


@pytest.mark.parametrize("dtype", [jnp.float32, bool, jnp.complex64])
def test_other_inputs_are_refused(dtype):
    layer = nnx.Embed(5, 3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="must be an integer"):
        layer(jnp.ones(2, dtype))


def test_negative_numbers_wrap_and_numbers_outside_give_nan():
    layer = nnx.Embed(5, 3, rngs=nnx.Rngs(0))
    table = layer.embedding[...]
    y = layer(jnp.array([-1, -5, -6, 5]))
    np.testing.assert_array_equal(y[:2], table[jnp.array([4, 0])])
    assert jnp.isnan(y[2:]).all()


def test_a_single_row_is_given_for_every_number():
    layer = nnx.Embed(1, 3, rngs=nnx.Rngs(0))
    y = layer(jnp.array([[0, 7], [-3, 1]]))
    np.testing.assert_array_equal(
        y, jnp.broadcast_to(layer.embedding[...], (4, 3)).reshape(2, 2, 3)
    )


def test_attend_multiplies_with_every_row():
    layer = nnx.Embed(5, 3, rngs=nnx.Rngs(0))
    query = random(2, 4, 3)
    expected = np.float64(query) @ np.float64(layer.embedding[...]).T
    np.testing.assert_allclose(layer.attend(query), expected, rtol=1e-5, atol=1e-6)
    assert layer.attend(query[0, 0]).shape == (5,)


def test_initial_standard_deviation_is_that_of_the_features():
    table = nnx.Embed(1000, 64, rngs=nnx.Rngs(0)).embedding[...]
    np.testing.assert_allclose(table.std(), 1 / 8, rtol=0.02)


def test_dtype_is_that_of_the_table_if_not_given():
    layer = nnx.Embed(5, 3, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert layer.dtype == jnp.bfloat16
    assert layer(jnp.array([1])).dtype == jnp.bfloat16
    layer = nnx.Embed(5, 3, dtype=jnp.float16, rngs=nnx.Rngs(0))
    assert layer(jnp.array([1])).dtype == jnp.float16
    assert layer.attend(jnp.ones(3)).dtype == jnp.float16


def test_tables_of_integers_are_possible():
    ones = nnx.initializers.ones
    layer = nnx.Embed(
        5, 3, param_dtype=jnp.int32, embedding_init=ones, rngs=nnx.Rngs(0)
    )
    assert layer(jnp.array([1])).dtype == jnp.int32


@pytest.mark.parametrize("num_embeddings", [1, 8])
@pytest.mark.parametrize("spec", [("x", None), ("x", "y")])
def test_out_sharding_shards_the_result(num_embeddings, spec):
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=explicit)
    layer = nnx.Embed(num_embeddings, 4, rngs=nnx.Rngs(0))
    expected = layer(jnp.arange(8))
    spec = jax.sharding.PartitionSpec(*spec)
    with jax.set_mesh(mesh):
        y = jax.jit(lambda m, x: m(x, out_sharding=spec))(layer, jnp.arange(8))
        assert jax.typeof(y).sharding.spec == spec
        np.testing.assert_array_equal(y, expected)


def test_out_sharding_shards_the_products():
    explicit = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((4,), ("x",), axis_types=explicit)
    layer = nnx.Embed(8, 4, rngs=nnx.Rngs(0))
    spec = jax.sharding.PartitionSpec(None, "x")
    with jax.set_mesh(mesh):
        attend = jax.jit(lambda m, x: m.attend(x, out_sharding=spec))
        assert jax.typeof(attend(layer, jnp.ones((3, 4)))).sharding.spec == spec


@pytest.mark.peers
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("num_embeddings", [1, 6])
def test_embed_equals_the_peer(peer, dtype, param_dtype, num_embeddings):
    options = {"dtype": dtype, "param_dtype": param_dtype}
    ours = nnx.Embed(num_embeddings, 4, **options, rngs=nnx.Rngs(2))
    theirs = peer.Embed(num_embeddings, 4, **options, rngs=peer.Rngs(2))
    np.testing.assert_array_equal(ours.embedding[...], theirs.embedding[...])
    inputs = jnp.array([[0, 5], [-1, 9]])
    assert ours(inputs).dtype == theirs(inputs).dtype
    np.testing.assert_array_equal(np.float32(ours(inputs)), np.float32(theirs(inputs)))
    query = random(3, 4)
    np.testing.assert_allclose(
        np.float32(ours.attend(query)), np.float32(theirs.attend(query)), rtol=1e-5
    )
