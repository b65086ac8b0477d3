"""MultiHeadLatentAttention is its formula, with and without a cache of latents."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import meshes, tables
from tests.comparisons import unchanged
from tests.contract.test_nn_layers.test_attention import attention, rotated
from tests.random_arrays import random

X = np.asarray(random(2, 9, 8))
POSITIONS = np.tile(np.arange(9), (2, 1))
SIZES = {
    "kv_lora_rank": 5,
    "qk_nope_head_dim": 3,
    "qk_rope_head_dim": 4,
    "v_head_dim": 2,
}


def make_layer(**options):
    numbers = np.random.default_rng(0)

    def initializer(key, shape, dtype):
        return jnp.asarray(numbers.normal(scale=0.5, size=shape), dtype)

    options = {"rope": nnx.RoPE(), "kernel_init": initializer} | SIZES | options
    layer = nnx.MultiHeadLatentAttention(3, 8, **options, rngs=nnx.Rngs(0))
    for norm in (layer.query_norm, layer.kv_norm):
        if norm is not None:
            norm.scale[...] = initializer(None, norm.scale.shape, norm.scale.dtype)
    return layer


def expected_of(layer, x=X, positions=POSITIONS, **options):
    """DeepSeek-V2, equations 9 to 19, with all keys and values of heads."""
    x = np.asarray(x, float)

    def linear(part, x):
        return np.tensordot(x, np.asarray(part.kernel[...], float), 1)

    def norm(part, x):
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + part.epsilon)
        return x * np.asarray(part.scale[...], float)

    def turned(x):
        return np.swapaxes(rotated(np.swapaxes(x, 1, 2), positions[:, None]), 1, 2)

    down = x
    if layer.query_down is not None:
        down = norm(layer.query_norm, linear(layer.query_down, x))
    query = linear(layer.query, down)
    query = np.concatenate([query[..., :3], turned(query[..., 3:])], -1)
    latent, shared = np.split(linear(layer.kv_down, x), [5], axis=-1)
    up = norm(layer.kv_norm, latent)
    up = np.tensordot(up, np.asarray(layer.kv_up[...], float), 1)
    shared = np.broadcast_to(turned(shared[:, :, None]), (2, x.shape[1], 3, 4))
    key = np.concatenate([up[..., :3], shared], -1)
    heads = attention(query, key, up[..., 3:], scale=layer.scale, **options)
    return np.einsum("...hd,hdo->...o", heads, np.asarray(layer.out.kernel[...], float))


def in_parts(layer, cache, lengths=(4, 1, 4), **call):
    step = nnx.jit(lambda layer, x, cache, call: layer(x, cache=cache, **call))
    results, start = [], 0
    for length in lengths:
        at = slice(start, start + length)
        own = {name: x[:, at] for name, x in ({"positions": POSITIONS} | call).items()}
        results.append(step(layer, X[:, at], cache, own))
        start += length
    return np.concatenate(results, axis=1)


@tables.cases("options", {}, {"q_lora_rank": 6}, {"scale": 0.7})
@pytest.mark.parametrize("way", [None, (9,), (4, 1, 4), (1,) * 9])
def test_it_is_its_formula_with_and_without_a_cache(options, way):
    layer = make_layer(**options)
    y = layer(X) if way is None else in_parts(layer, layer.make_cache(2, 9), way)
    expected = expected_of(layer, is_causal=True)
    np.testing.assert_allclose(y, expected, rtol=2e-5, atol=2e-5)


def test_a_cache_keeps_the_latent_and_the_shared_key_only():
    layer = make_layer(dtype=jnp.bfloat16)
    cache = layer.make_cache(2, 9)
    assert (cache.value.shape, cache.key.shape) == ((2, 9, 1, 5), (2, 9, 1, 4))
    y = in_parts(layer, cache)
    assert {y.dtype, cache.key.dtype, cache.value.dtype} == {jnp.dtype(jnp.bfloat16)}
    expected = expected_of(layer, is_causal=True)
    np.testing.assert_allclose(np.float32(y), expected, rtol=0.1, atol=0.05)


@pytest.mark.long
def test_segments_and_a_prefix_work_with_and_without_a_cache():
    layer = make_layer()
    segments = np.array([[1] * 4 + [2] * 5] * 2)
    positions = np.array([[*range(4), *range(5)]] * 2)
    call = {"positions": positions, "segment_ids": segments}
    sees = (segments[:, :, None] == segments[:, None]) & np.tri(9, dtype=bool)
    expected = expected_of(layer, positions=positions, mask=sees[:, None])
    cache = layer.make_cache(2, 9, packed=True)
    for y in (layer(X, **call), in_parts(layer, cache, **call)):
        np.testing.assert_allclose(y, expected, rtol=2e-5, atol=2e-5)
    call = {"positions": POSITIONS, "prefix_lengths": np.array([3, 2])}
    first = np.arange(9) < call["prefix_lengths"][:, None]
    sees = np.tri(9, dtype=bool) | (first[:, :, None] & first[:, None])
    expected = expected_of(layer, mask=sees[:, None])
    for more in ({}, {"cache": layer.make_cache(2, 9)}):
        y = layer(X, **call, **more)
        np.testing.assert_allclose(y, expected, rtol=2e-5, atol=2e-5)


def test_gradients_through_a_cache_are_those_without(float64):
    layer, x = make_layer(param_dtype=jnp.float64), np.float64(X)

    def loss(layer, cached):
        call = {"cache": layer.make_cache(2, 9), "positions": POSITIONS}
        return jnp.sin(layer(x, **(call if cached else {}))).sum()

    grad = nnx.jit(nnx.grad(loss), static_argnums=1)
    jax.tree.map(
        lambda *x: np.testing.assert_allclose(*x, rtol=1e-10, atol=1e-12),
        *(grad(layer, cached) for cached in (False, True)),
    )


@pytest.mark.long
def test_policies_reach_both_forms():
    layer = make_layer()
    nnx.precision.set_policy(layer, "params=f32, compute=bf16")
    y, cached = layer(X), in_parts(layer, layer.make_cache(2, 9))
    assert y.dtype == cached.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(y), np.float32(cached), rtol=0.1, atol=0.05)
    report = nnx.precision.report(lambda layer: layer(X), layer)
    operands = {x.operands for x in report.operations if x.name == "dot"}
    assert operands == {("bfloat16", "bfloat16")}


@pytest.mark.long
def test_low_rank_changes_reach_both_forms():
    layer = make_layer()
    plain = layer(X)
    nnx.surgery.add_lora(layer, "kv_up", rank=2, rngs=nnx.Rngs(0))
    for path, param in nnx.to_flat_state(nnx.state(layer, nnx.LoRAParam)):
        param.set_value(random(*param.shape, seed=len(path[-1])))
    y, cached = layer(X), in_parts(layer, layer.make_cache(2, 9))
    assert np.abs(y - plain).max() > 0.01
    np.testing.assert_allclose(y, cached, rtol=1e-4, atol=1e-4)


def test_both_forms_drop_the_same_weights():
    @nnx.jit
    def train(layer, call):
        return layer(X, deterministic=False, rngs=nnx.Rngs(dropout=3), **call)

    layer = make_layer(dropout_rate=0.5)
    y = train(layer, {})
    call = {"cache": layer.make_cache(2, 9), "positions": POSITIONS}
    np.testing.assert_allclose(train(layer, call), y, rtol=1e-4, atol=1e-5)
    layer.eval()
    evaluated = nnx.jit(lambda layer: layer(X))(layer)
    expected = expected_of(layer, is_causal=True)
    np.testing.assert_allclose(evaluated, expected, rtol=2e-5, atol=2e-5)
    assert np.abs(evaluated - y).max() > 0.1


def test_its_params_are_divided_by_heads_as_their_metadata_say():
    def make():
        return make_layer(
            q_lora_rank=4,
            use_bias=True,
            kernel_metadata={"out_sharding": (None, "model", None)},
            down_kernel_metadata={"out_sharding": (None, None)},
            out_kernel_metadata={"out_sharding": ("model", None, None)},
            bias_metadata={"out_sharding": (None,)},
        )

    expected = make_layer(q_lora_rank=4, use_bias=True)(X)
    with jax.set_mesh(meshes.mesh_of(model=3)):
        layer = nnx.jit(make)()
        cache = layer.make_cache(2, 9)
        ys = layer(X), layer(X, positions=POSITIONS, cache=cache)
    kernels = layer.query.kernel, layer.kv_up, layer.out.kernel, layer.kv_down.kernel
    pieces = [kernel.sharding.shard_shape(kernel.shape) for kernel in kernels]
    assert pieces == [(4, 1, 7), (5, 1, 5), (1, 2, 8), (8, 9)]
    for y in ys:
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


def test_a_call_that_fails_leaves_cache_and_stream_as_they_were():
    layer = make_layer(dropout_rate=0.5, deterministic=False)
    cache = layer.make_cache(2, 9)
    with unchanged(layer), pytest.raises(ValueError, match="needs positions"):
        layer(X, cache=cache)
    layer.dropout_rate = 0.0
    with unchanged(cache), pytest.raises(ValueError, match="needs positions"):
        layer(X, cache=cache)
    with unchanged(cache), pytest.raises(ValueError, match="needs segment"):
        layer(X, cache=cache, positions=POSITIONS, segment_ids=np.ones((2, 9), int))
