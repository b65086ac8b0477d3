"""Dropout: what it drops, where its keys come from, shardings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import meshes, random_arrays, tables
from tests.comparisons import raises


def draw(seed, *path):
    """The key at the end of a chain of draws from a stream with this seed."""
    key = jax.random.key(seed)
    for count in path:
        key = jax.random.fold_in(key, count)
    return key


# ---------------------------------------------------------------------- what it drops


@pytest.mark.parametrize("rate", [0.1, 0.5, np.float32(0.75), np.float64(0.75)])
def test_kept_entries_are_scaled_up(rate):
    x = random_arrays.random(200, 50, seed=1)
    y = np.asarray(nnx.Dropout(rate, rngs=nnx.Rngs(0))(x))
    kept = y != 0
    assert y.dtype == np.float32
    np.testing.assert_allclose(kept.mean(), 1 - rate, atol=0.02)
    np.testing.assert_allclose(y[kept], np.asarray(x)[kept] / (1 - rate), rtol=1e-6)


def test_inputs_pass_through_as_the_same_object_or_as_zeros_without_a_draw():
    x = jnp.ones((2, 3), jnp.bfloat16)
    for deterministic in (True, None):
        layer = nnx.Dropout(0.5, deterministic=deterministic)
        assert layer(x, deterministic=True) is nnx.Dropout(0.0)(x) is x
    y = nnx.Dropout(1.0)(x)
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y, np.zeros((2, 3)))


@pytest.mark.parametrize("dims", [(0,), (-1,), [1, 2], (0, 1, 2)])
def test_broadcast_dims_share_their_fate(dims):
    layer = nnx.Dropout(0.5, broadcast_dims=dims, rngs=nnx.Rngs(0))
    small = np.array((4, 5, 6))
    small[[*dims]] = 1
    kept = jax.random.bernoulli(draw(0, 0, 0), 0.5, small.tolist())
    expected = np.broadcast_to(2.0 * kept, (4, 5, 6))
    np.testing.assert_array_equal(layer(jnp.ones((4, 5, 6))), expected)


@pytest.mark.parametrize("dims", [(), (1,), (0, 1)])
@pytest.mark.parametrize("is_jitted", [True, False])
@pytest.mark.parametrize("is_in_context", [True, False])
def test_explicit_sharding_is_kept(dims, is_jitted, is_in_context):
    mesh, spec = meshes.mesh_of("Explicit", x=4, y=2), jax.P("x", "y")
    x = jax.device_put(np.ones((8, 4), np.float32), jax.NamedSharding(mesh, spec))
    layer = nnx.Dropout(0.5, broadcast_dims=dims)

    def call(x):
        return layer(x, rngs=jax.random.key(0))

    expected = call(jnp.ones((8, 4)))
    context = jax.set_mesh(mesh) if is_in_context else jax.enable_x64(False)
    with context:
        y = (jax.jit(call) if is_jitted else call)(x)
    assert jax.typeof(y).sharding.spec == spec
    np.testing.assert_array_equal(y, expected)


# -------------------------------------------------------------- where keys come from


def test_a_missing_setting_is_an_error_with_the_ways_out():
    layer = nnx.Dropout(0.5, deterministic=None)
    ways = "Dropout(..., deterministic=", "layer(x, deter", "nnx.view(model, d"
    ways = ("model.train() or model.eval()", *ways)
    with raises(ValueError, "No `deterministic` argument", *ways):
        layer(jnp.ones(3))
    layer.eval()
    assert (layer(jnp.ones(3)) == 1).all()


def test_rate_is_checked_at_construction():
    for rate in (-0.1, 1.1, float("nan"), 50):
        with pytest.raises(ValueError, match=r"rate.*\[0, 1\]"):
            nnx.Dropout(rate)


@tables.cases("rngs", 0, jax.random.key(0), "dropout", np.zeros(2, np.uint32))
def test_something_other_than_rngs_is_refused(rngs):
    with pytest.raises(TypeError, match="rngs must be a Rngs, RngStream or None"):
        nnx.Dropout(0.5, rngs=rngs)
    if not isinstance(rngs, jax.Array):
        message = "rngs must be a Rngs, RngStream or jax.Array"
        with pytest.raises(TypeError, match=message):
            nnx.Dropout(0.5)(jnp.ones(3), rngs=rngs)


def test_absent_keys_and_streams_are_named():
    message = "`deterministic` is False, but no `rngs` argument was provided to Dropout"
    with pytest.raises(ValueError, match=message):
        nnx.Dropout(0.5)(jnp.ones(3))
    with pytest.raises(KeyError, match="dropout"):
        nnx.Dropout(0.5, rngs=nnx.Rngs(params=0))
    with pytest.raises(KeyError, match="dropout"):
        nnx.Dropout(0.5)(jnp.ones(3), rngs=nnx.Rngs(params=0))


def test_a_given_stream_is_forked_with_its_tag():
    rngs = nnx.Rngs(0, dropout=1)
    layer = nnx.Dropout(0.5, rngs=rngs.dropout)
    assert layer.rngs is not rngs.dropout
    assert (layer.rngs.tag, rngs.dropout.count[...]) == ("dropout", 1)
    assert layer.rngs.key[...] == draw(1, 0)


def test_rng_collection_names_the_stream_of_the_call_too():
    layer = nnx.Dropout(0.5, rng_collection="noise", rngs=nnx.Rngs(0, noise=5))
    rngs = nnx.Rngs(0, noise=7)
    layer(jnp.ones(3), rngs=rngs)
    assert (rngs.noise.count[...], rngs.default.count[...]) == (1, 0)


def test_rngs_of_the_call_take_precedence():
    layer = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    kept = jax.random.bernoulli(jax.random.key(9), 0.5, (16,))
    for key in (jax.random.key(9), jax.random.PRNGKey(9)):
        np.testing.assert_array_equal(layer(jnp.ones(16), rngs=key), 2.0 * kept)
    stream = nnx.RngStream(4, tag="any")
    layer(jnp.ones(16), rngs=stream)
    assert stream.count[...] == 1 and layer.rngs.count[...] == 0
