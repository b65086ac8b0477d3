"""Dropout: which keys it draws, what it drops, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx

P = jax.sharding.PartitionSpec


def draw(seed, *path):
    """The key at the end of a chain of draws from a stream with this seed."""
    key = jax.random.key(seed)
    for count in path:
        key = jax.random.fold_in(key, count)
    return key


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.75])
def test_kept_entries_are_scaled_up(rate):
    x = jax.random.normal(jax.random.key(1), (200, 50))
    y = nnx.Dropout(rate, rngs=nnx.Rngs(0))(x)
    kept = y != 0
    np.testing.assert_allclose(kept.mean(), 1 - rate, atol=0.02)
    np.testing.assert_allclose(y[kept], x[kept] / (1 - rate), rtol=1e-6)


def test_nth_call_uses_the_nth_key_of_the_forked_stream():
    layer = nnx.Dropout(0.5, rngs=nnx.Rngs(3))
    for n in range(3):
        kept = jax.random.bernoulli(draw(3, 0, n), 0.5, (16,))
        np.testing.assert_array_equal(layer(jnp.ones(16)), 2.0 * kept)


@pytest.mark.parametrize("deterministic", [True, None])
def test_inputs_pass_through_as_the_same_object(deterministic):
    layer = nnx.Dropout(0.5, deterministic=deterministic)
    x = jnp.ones(3)
    assert layer(x, deterministic=True) is x
    assert nnx.Dropout(0.0)(x) is x


def test_rate_one_drops_everything_without_a_draw():
    x = jnp.ones((2, 3), jnp.bfloat16)
    y = nnx.Dropout(1.0)(x)
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y, jnp.zeros_like(x))


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan"), 50])
def test_rate_is_checked_at_construction(rate):
    with pytest.raises(ValueError, match=r"rate.*\[0, 1\]"):
        nnx.Dropout(rate)


def test_call_overrides_the_attribute():
    layer = nnx.Dropout(0.5, deterministic=True, rngs=nnx.Rngs(0))
    assert layer(jnp.ones(64), deterministic=False).min() == 0


def test_deterministic_must_be_said_somewhere():
    message = "No `deterministic` argument was provided to Dropout"
    with pytest.raises(ValueError, match=message):
        nnx.Dropout(0.5, deterministic=None)(jnp.ones(3))


def test_a_key_must_come_from_somewhere():
    message = "`deterministic` is False, but no `rngs` argument was provided to Dropout"
    with pytest.raises(ValueError, match=message):
        nnx.Dropout(0.5)(jnp.ones(3))


@pytest.mark.parametrize("rngs", [0, jax.random.key(0), "dropout"])
def test_constructor_takes_rngs_or_a_stream(rngs):
    with pytest.raises(TypeError, match="rngs must be a Rngs, RngStream or None"):
        nnx.Dropout(0.5, rngs=rngs)


@pytest.mark.parametrize("rngs", [0, "dropout", np.zeros(2, np.uint32)])
def test_call_takes_rngs_a_stream_or_a_key(rngs):
    with pytest.raises(TypeError, match="rngs must be a Rngs, RngStream or jax.Array"):
        nnx.Dropout(0.5)(jnp.ones(3), rngs=rngs)


def test_missing_stream_is_named():
    with pytest.raises(KeyError, match="dropout"):
        nnx.Dropout(0.5, rngs=nnx.Rngs(params=0))
    with pytest.raises(KeyError, match="dropout"):
        nnx.Dropout(0.5)(jnp.ones(3), rngs=nnx.Rngs(params=0))


def test_fork_draws_one_key_and_keeps_the_tag():
    rngs = nnx.Rngs(0, dropout=1)
    layer = nnx.Dropout(0.5, rngs=rngs)
    assert rngs.dropout.count[...] == 1
    assert layer.rngs.tag == "dropout"
    assert layer.rngs is not rngs.dropout
    assert nnx.Dropout(0.5, rngs=nnx.Rngs(0)).rngs.tag == "default"
    assert nnx.Dropout(0.5, rngs=rngs.dropout).rngs.key[...] == draw(1, 1)


def test_rng_collection_names_the_stream():
    layer = nnx.Dropout(0.5, rng_collection="noise", rngs=nnx.Rngs(0, noise=5))
    assert layer.rngs.key[...] == draw(5, 0)
    rngs = nnx.Rngs(0, noise=7)
    layer(jnp.ones(3), rngs=rngs)
    assert rngs.noise.count[...] == 1


def test_rngs_of_the_call_take_precedence():
    layer = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    kept = jax.random.bernoulli(jax.random.key(9), 0.5, (16,))
    y = layer(jnp.ones(16), rngs=jax.random.key(9))
    np.testing.assert_array_equal(y, 2.0 * kept)
    old_style = layer(jnp.ones(16), rngs=jax.random.PRNGKey(9))
    np.testing.assert_array_equal(old_style, 2.0 * kept)
    stream = nnx.RngStream(4, tag="any")
    layer(jnp.ones(16), rngs=stream)
    assert stream.count[...] == 1
    assert layer.rngs.count[...] == 0


def test_layer_with_rngs_stays_in_step_with_one_without():
    own = nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=0))
    given, rngs = nnx.Dropout(0.5), nnx.Rngs(dropout=0).fork()
    for _ in range(3):
        x = jnp.ones(32)
        np.testing.assert_array_equal(own(x), given(x, rngs=rngs))


@pytest.mark.parametrize("dims", [(0,), (-1,), [1, 2], (0, 1, 2)])
def test_broadcast_dims_share_their_fate(dims):
    shape = (4, 5, 6)
    layer = nnx.Dropout(0.5, broadcast_dims=dims, rngs=nnx.Rngs(0))
    y = layer(jnp.ones(shape))
    axes = {d % 3 for d in dims}
    small = [1 if axis in axes else n for axis, n in enumerate(shape)]
    kept = jax.random.bernoulli(draw(0, 0, 0), 0.5, small)
    np.testing.assert_array_equal(y, jnp.broadcast_to(2.0 * kept, shape))


def test_broadcast_dims_must_exist():
    layer = nnx.Dropout(0.5, broadcast_dims=(2,), rngs=nnx.Rngs(0))
    with pytest.raises(IndexError):
        layer(jnp.ones((2, 2)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.complex64])
@pytest.mark.parametrize("rate", [0.5, np.float64(0.5), np.float32(0.5)])
def test_dtype_is_that_of_the_inputs(dtype, rate):
    layer = nnx.Dropout(rate, rngs=nnx.Rngs(0))
    assert layer(jnp.ones(3, dtype)).dtype == dtype


def test_integers_become_floats():
    y = nnx.Dropout(0.5, rngs=nnx.Rngs(0))(jnp.ones(8, jnp.int32))
    np.testing.assert_array_equal(y, [2, 0, 2, 0, 2, 2, 2, 0])
    assert y.dtype == jnp.float32


@pytest.mark.parametrize("dims", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize("is_jitted", [True, False])
@pytest.mark.parametrize("is_in_context", [True, False])
def test_explicit_sharding_is_kept(dims, is_jitted, is_in_context):
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=explicit)
    sharding = jax.sharding.NamedSharding(mesh, P("x", "y"))
    x = jax.device_put(jnp.ones((8, 4)), sharding)
    layer = nnx.Dropout(0.5, broadcast_dims=dims)

    def call(x):
        return layer(x, rngs=jax.random.key(0))

    expected = call(jnp.ones((8, 4)))
    context = jax.set_mesh(mesh) if is_in_context else jax.enable_x64(False)
    with context:
        y = (jax.jit(call) if is_jitted else call)(x)
    assert jax.typeof(y).sharding.spec == P("x", "y")
    np.testing.assert_array_equal(y, expected)


def test_view_sets_deterministic():
    layer = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    x = jnp.ones(3)
    assert nnx.view(layer, deterministic=True)(x) is x
    assert layer.deterministic is False
    info = nnx.view_info(layer)
    assert info.startswith("Dropout:\n  deterministic: bool | None = None\n    ")


def test_closed_over_layer_can_not_draw():
    layer = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    with pytest.raises(nnx.errors.TraceContextError, match="Cannot mutate RngCount"):
        jax.jit(lambda x: layer(x))(jnp.ones(3))


@pytest.mark.peers
@pytest.mark.parametrize("dims", [(), (0,), (-1, 1)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dropout_equals_the_peer(peer, dims, dtype):
    options = {"rate": 0.3, "broadcast_dims": dims}
    ours = nnx.Dropout(**options, rngs=nnx.Rngs(2))
    theirs = peer.Dropout(**options, rngs=peer.Rngs(2))
    x = jax.random.normal(jax.random.key(0), (3, 4, 5), dtype)
    for _ in range(3):
        np.testing.assert_array_equal(ours(x), theirs(x))
