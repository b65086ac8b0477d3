"""MultiHeadAttention: projections, settings, dropout, recorded weights, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests.nn.attention_formulas import (
    layer_output,
    make_layer,
    params_of,
)
from tests.programs import in_one_program
from tests.random_arrays import random, random_mask

P = jax.sharding.PartitionSpec


# ------------------------------------------------------------------------- construction


@pytest.mark.parametrize(
    ("options", "draws"),
    [
        ({}, 8),
        ({"normalize_qk": True}, 10),
        ({"use_bias": False}, 4),
        ({"dropout_rate": 0.5}, 9),
        ({"dropout_rate": 0.5, "keep_rngs": False}, 8),
    ],
)
def test_number_of_keys_drawn(options, draws):
    rngs = nnx.Rngs(0)
    layer = nnx.MultiHeadAttention(2, 4, **options, rngs=rngs)
    assert rngs.default.count[...] == draws
    if draws == 9:
        assert layer.rngs.key[...] == jax.random.fold_in(jax.random.key(0), 8)
        assert (layer.rngs.tag, layer.rngs.count[...]) == ("default", 0)
    else:
        assert layer.rngs is None


def test_shapes_follow_the_sizes():
    layer = make_layer(4, 6, 16, 10, 2, 5)
    assert {name: p.shape for name, p in params_of(layer).items()} == {
        "key.bias": (2, 4),
        "key.kernel": (5, 2, 4),
        "out.bias": (10,),
        "out.kernel": (4, 4, 10),
        "query.bias": (4, 4),
        "query.kernel": (6, 4, 4),
        "value.bias": (2, 4),
        "value.kernel": (5, 2, 4),
    }
    assert (layer.head_dim, layer.num_kv_heads, layer.in_kv_features) == (4, 2, 5)


def test_settings_of_out_fall_back_to_those_of_the_inputs():
    ones, zeros = nnx.initializers.ones, nnx.initializers.zeros
    layer = make_layer(
        kernel_init=ones, kernel_metadata={"a": 1}, bias_metadata={"b": 2}
    )
    for name in ("query", "key", "value", "out"):
        assert (getattr(layer, name).kernel[...] == 1).all()
        assert getattr(layer, name).kernel.a == 1
        assert getattr(layer, name).bias.b == 2
    layer = make_layer(
        kernel_init=ones,
        out_kernel_init=zeros,
        out_bias_init=ones,
        kernel_metadata={"a": 1},
        out_kernel_metadata={"a": 3},
        out_bias_metadata={"b": 4},
        normalize_qk=True,
        query_ln_scale_metadata={"c": 5},
        key_ln_scale_metadata={"c": 6},
    )
    assert (layer.out.kernel[...] == 0).all() and (layer.out.bias[...] == 1).all()
    assert (layer.query.kernel.a, layer.out.kernel.a, layer.out.bias.b) == (1, 3, 4)
    assert (layer.query_ln.scale.c, layer.key_ln.scale.c) == (5, 6)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((3, 4), r"\(4\) must be divisible by 'num_heads' heads \(3\)"),
        ((4, 8, None, None, 3), r"\(4\) must be divisible by num_kv_heads \(3\)"),
        ((4, 8, None, None, 0), "must be divisible by num_kv_heads"),
        ((0, 8, None, None, 1), "must be divisible by 'num_heads' heads"),
    ],
)
def test_heads_must_divide_each_other_and_the_features(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_layer(*sizes)


# -------------------------------------------------------------------------------- calls


@pytest.mark.parametrize(
    ("batch", "options"),
    [
        ((), {}),
        ((2, 3), {"num_kv_heads": 2, "qkv_features": 16, "out_features": 5}),
        ((2,), {"num_kv_heads": 1, "qkv_features": 16, "normalize_qk": True}),
    ],
)
def test_self_attention_is_attention_of_projections(batch, options):
    layer, x = make_layer(**options), random(*batch, 5, 8)
    mask = random_mask(*batch, 1, 5, 5)
    y = in_one_program(layer, x, mask=mask)
    np.testing.assert_allclose(
        y, layer_output(layer, x, mask=mask), rtol=1e-4, atol=1e-5
    )


def test_cross_attention_takes_keys_of_other_length_and_size():
    layer = make_layer(4, 8, in_kv_features=3)
    query, key = random(2, 5, 8, seed=1), random(2, 7, 3, seed=2)
    y = layer(query, key)
    np.testing.assert_allclose(y, layer_output(layer, query, key), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(y, layer(query, key, key))


def test_float64_layer_computes_in_float64(float64):
    layer = make_layer(param_dtype=jnp.float64, normalize_qk=True, num_kv_heads=2)
    x = random(2, 5, 8, dtype=jnp.float64)
    expected = layer_output(layer, x, mask=np.tril(np.ones((5, 5), bool)))
    y = in_one_program(layer, x, is_causal=True)
    np.testing.assert_allclose(y, expected, rtol=1e-11)


def test_lists_are_inputs():
    layer = make_layer(1, 2)
    x = [[1.0, 2.0], [0.0, 1.0]]
    np.testing.assert_array_equal(layer(x), layer(jnp.array(x)))


@pytest.mark.parametrize(
    ("options", "call", "message"),
    [
        ({"decode": None}, {}, "No `decode` argument was provided"),
        ({"dropout_rate": 0.5}, {}, "No `deterministic` argument was provided"),
        (
            {"dropout_rate": 0.5, "keep_rngs": False},
            {"deterministic": False},
            "'rngs' must be provided",
        ),
        (
            {},
            {"inputs_v": jnp.ones((1, 3, 8))},
            "`inputs_k` cannot be None if `inputs_v`",
        ),
        ({"in_features": 4}, {}, "Incompatible input dimension, got 8 .* expects 4"),
        ({}, {"decode": True}, "Autoregressive cache not initialized"),
        ({}, {"inputs_k": jnp.ones((2, 3, 8))}, "batch dims must match"),
        ({"dropout_rate": 1.0}, {"deterministic": True}, "must be in the range"),
    ],
)
def test_bad_calls_are_refused(options, call, message):
    with pytest.raises(ValueError, match=message):
        make_layer(**options)(jnp.ones((1, 3, 8)), **call)


def test_call_overrides_the_attributes():
    layer = make_layer(decode=True, dropout_rate=0.5, deterministic=False)
    x = random(1, 3, 8)
    y = in_one_program(layer, x, decode=False, deterministic=True)
    np.testing.assert_allclose(y, layer_output(layer, x), rtol=1e-4, atol=1e-5)
    assert layer.rngs.count[...] == 0


# --------------------------------------------------------------- the attention function


def recording(calls):
    def attention_fn(query, key, value, **options):
        calls.append(options)
        return nnx.dot_product_attention(query, key, value)

    return attention_fn


def test_attention_function_gets_the_settings_as_keywords():
    calls = []
    layer = make_layer(
        attention_fn=recording(calls),
        dropout_rate=0.25,
        broadcast_dropout=False,
        precision="highest",
        dtype=jnp.float32,
    )
    layer(random(1, 3, 8), deterministic=True, is_causal=True)
    assert calls.pop() == {
        "mask": None,
        "dropout_rng": None,
        "dropout_rate": 0.25,
        "broadcast_dropout": False,
        "deterministic": True,
        "dtype": jnp.float32,
        "precision": "highest",
        "module": None,
        "is_causal": True,
    }
    layer(random(1, 3, 8), deterministic=False, sow_weights=True)
    options = calls.pop()
    key = jax.random.fold_in(layer.rngs.key[...], 0)
    assert options["dropout_rng"] == key and options["deterministic"] is False
    assert options["module"] is layer


def test_positions_are_passed_on_only_if_given():
    calls = []
    layer, x = make_layer(attention_fn=recording(calls)), random(1, 3, 8)
    positions = jnp.arange(3)
    layer(x, input_positions=positions)
    assert calls.pop()["input_positions"] is positions
    with pytest.raises(TypeError, match="input_positions"):
        make_layer()(x, input_positions=positions)


def test_hooks_reach_their_layers():
    seen = []

    def hook(name):
        def dot_general(*args, **kwargs):
            seen.append(name)
            return jax.lax.dot_general(*args, **kwargs)

        return dot_general

    def promote(name):
        def promote_dtype(args, **kwargs):
            seen.append(name)
            return args

        return promote_dtype

    layer = make_layer(
        normalize_qk=True,
        qkv_dot_general=hook("qkv"),
        out_dot_general_cls=lambda: hook("out"),
        qkv_promote_dtype=promote("promote qkv"),
        out_promote_dtype=promote("promote out"),
        ln_promote_dtype=promote("promote ln"),
    )
    layer(random(1, 3, 8))
    inputs = ["promote qkv", "qkv"] * 3
    assert seen == [*inputs, "promote ln", "promote ln", "promote out", "out"]


# --------------------------------------------------------------------------------- peer

PEER_OPTIONS = [
    {"dropout_rate": 0.3, "broadcast_dropout": False, "num_kv_heads": 2},
    {"param_dtype": jnp.bfloat16, "dtype": jnp.bfloat16, "use_bias": False},
]


@pytest.mark.peers
@pytest.mark.parametrize("options", PEER_OPTIONS)
def test_layer_equals_the_peer(peer, options):
    ours, theirs = (
        library.MultiHeadAttention(
            4, 8, **options, decode=False, deterministic=False, rngs=library.Rngs(3)
        )
        for library in (nnx, peer)
    )
    a = dict(nnx.to_flat_state(nnx.state(ours, nnx.Param)))
    b = dict(peer.to_flat_state(peer.state(theirs, peer.Param)))
    assert list(a) == list(b)
    for path in a:
        np.testing.assert_array_equal(a[path][...], b[path][...])
    x = random(2, 5, 8)
    tolerance = 0.05 if "dtype" in options else 1e-5
    for _ in range(2):
        y, expected = ours(x, is_causal=True), theirs(x, is_causal=True)
        assert y.dtype == expected.dtype
        np.testing.assert_allclose(
            y.astype(float), expected.astype(float), rtol=tolerance, atol=tolerance
        )
