"""MultiHeadAttention: projections, settings, dropout, views, sharding, its program."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import tables
from tests.meshes import mesh_of
from tests.nn.attention_formulas import layer_output, make_layer, params_of
from tests.programs import in_one_program
from tests.random_arrays import random, random_mask

# ------------------------------------------------------------------------- construction


@tables.cases(
    "options, draws",
    ({"use_bias": False}, 4),
    ({"dropout_rate": 0.5, "keep_rngs": False}, 8),
)
def test_no_stream_is_forked_without_dropout_or_if_told_so(options, draws):
    rngs = nnx.Rngs(0)
    layer = nnx.MultiHeadAttention(2, 4, **options, rngs=rngs)
    assert (rngs.default.count[...], layer.rngs) == (draws, None)


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
    for part in (layer.query, layer.key, layer.value, layer.out):
        assert (part.kernel[...] == 1).all()
        assert (part.kernel.a, part.bias.b) == (1, 2)
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


@tables.cases(
    "sizes, message",
    ((3, 4), r"\(4\) must be divisible by 'num_heads' heads \(3\)"),
    ((4, 8, None, None, 3), r"\(4\) must be divisible by num_kv_heads \(3\)"),
    ((4, 8, None, None, 0), "must be divisible by num_kv_heads"),
    ((0, 8, None, None, 1), "must be divisible by 'num_heads' heads"),
)
def test_heads_must_divide_each_other_and_the_features(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_layer(*sizes)


# -------------------------------------------------------------------------------- calls


@tables.cases(
    "batch, options",
    ((), {}),
    ((2, 3), {"num_kv_heads": 2, "qkv_features": 16, "out_features": 5}),
    ((2,), {"num_kv_heads": 1, "qkv_features": 16, "normalize_qk": True}),
    ((2,), {"in_kv_features": 3}),
)
def test_it_is_attention_of_projections(batch, options, float64):
    layer = make_layer(**options, param_dtype=jnp.float64)
    query = random(*batch, 5, 8, dtype=float)
    key, mask = None, random_mask(*batch, 1, 5, 5)
    if "in_kv_features" in options:  # of another length and size
        key, mask = random(*batch, 7, 3, dtype=float), None
    y = in_one_program(layer, query, key, mask=mask)
    expected = layer_output(layer, query, key, mask=mask)
    np.testing.assert_allclose(y, expected, rtol=1e-11, atol=1e-12)
    if key is not None:
        np.testing.assert_array_equal(y, in_one_program(layer, query, key, key))


@tables.cases(
    "options, call, message",
    ({"decode": None}, {}, "No `decode` argument was provided"),
    ({"dropout_rate": 0.5}, {}, "No `deterministic` argument was provided"),
    (
        {"dropout_rate": 0.5, "keep_rngs": False},
        {"deterministic": False},
        "'rngs' must be provided",
    ),
    ({}, {"inputs_v": jnp.ones((1, 3, 8))}, "cannot be None if `inputs_v`"),
    ({"in_features": 4}, {}, "Incompatible input dimension, got 8 .* expects 4"),
    ({}, {"decode": True}, "Autoregressive cache not initialized"),
    ({}, {"inputs_k": jnp.ones((2, 3, 8))}, "batch dims must match"),
    ({"dropout_rate": 1.0}, {"deterministic": True}, "must be in the range"),
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
    given = {"dropout_rate": 0.25, "broadcast_dropout": False, "deterministic": True}
    given |= {"dtype": jnp.float32, "precision": "highest", "is_causal": True}
    assert calls.pop() == dict.fromkeys(("mask", "dropout_rng", "module")) | given
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

    def seeing(name, function=lambda args, **options: args):
        def hook(*args, **options):
            seen.append(name)
            return function(*args, **options)

        return hook

    layer = make_layer(
        normalize_qk=True,
        qkv_dot_general=seeing("qkv", jax.lax.dot_general),
        out_dot_general_cls=lambda: seeing("out", jax.lax.dot_general),
        qkv_promote_dtype=seeing("promote qkv"),
        out_promote_dtype=seeing("promote out"),
        ln_promote_dtype=seeing("promote ln"),
    )
    layer(random(1, 3, 8))
    inputs = ["promote qkv", "qkv"] * 3
    assert seen == [*inputs, "promote ln", "promote ln", "promote out", "out"]


# ------------------------------------------------------------------------------ dropout


def test_each_active_call_draws_one_key():
    layer = make_layer(dropout_rate=0.5, deterministic=False)
    x = random(2, 3, 8)
    first, second = layer(x), layer(x)
    assert layer.rngs.count[...] == 2
    assert (first != second).any()
    layer(x, deterministic=True)
    assert layer.rngs.count[...] == 2


def test_rngs_of_the_call_take_precedence():
    layer = make_layer(dropout_rate=0.5, deterministic=False)
    rngs, stream = nnx.Rngs(0, dropout=1), nnx.RngStream(1, tag="any")
    x = random(2, 3, 8)
    np.testing.assert_array_equal(layer(x, rngs=rngs), layer(x, rngs=stream))
    assert (rngs.dropout.count[...], stream.count[...]) == (1, 1)
    assert (rngs.default.count[...], layer.rngs.count[...]) == (0, 0)


@tables.cases(
    "call, error, message",
    ({"mask": jnp.ones((3, 4))}, ValueError, None),
    ({"inputs_k": jnp.ones((1, 3, 8))}, ValueError, None),
    ({"rngs": 0}, TypeError, "rngs must be a Rngs, RngStream or None"),
    ({"rngs": nnx.Rngs(params=0)}, AttributeError, "No RngStream named 'dropout'"),
)
def test_call_that_fails_draws_nothing(call, error, message):
    layer = make_layer(dropout_rate=0.5, deterministic=False)
    with pytest.raises(error, match=message):
        layer(random(2, 3, 8), **call)
    assert layer.rngs.count[...] == 0
    with pytest.raises(AttributeError, match="No RngStream named 'dropout'"):
        nnx.MultiHeadAttention(2, 4, dropout_rate=0.5, rngs=nnx.Rngs(params=0))


# --------------------------------------------------------------------- recorded weights


def test_weights_are_captured_if_asked_for():
    layer, x = make_layer(num_kv_heads=2), random(2, 3, 8)
    forward = nnx.capture(layer, nnx.Intermediate)
    y, recorded = forward(x, sow_weights=True, is_causal=True)
    weights = recorded["attention_weights"][0]
    assert weights.shape == (2, 4, 3, 3)
    np.testing.assert_allclose(weights.sum(-1), np.ones((2, 4, 3)), rtol=1e-5)
    np.testing.assert_array_equal(weights, np.tril(weights))
    np.testing.assert_allclose(y, layer(x, is_causal=True), rtol=1e-4, atol=1e-5)
    assert not forward(x)[1]
    assert not hasattr(layer, "attention_weights")


def test_weights_become_an_attribute_outside_of_a_capture():
    layer, x = make_layer(), random(2, 3, 8)
    with pytest.warns(DeprecationWarning, match="nnx.capture"):
        layer(x, sow_weights=True)
    assert type(layer.attention_weights) is nnx.Intermediate
    (weights,) = layer.attention_weights.get_value()
    assert weights.shape == (2, 4, 3, 3)


# ------------------------------------------------------------------- programs, sharding


def pure_layer(params, x, mask=None, is_causal=False):
    """What one would write by hand."""

    def project(name):
        kernel, bias = params[name]
        y = jax.lax.dot_general(x, kernel, (((2,), (0,)), ((), ())))
        return y + bias.reshape(1, 1, *bias.shape)

    projected = map(project, ("query", "key", "value"))
    y = jax.nn.dot_product_attention(*projected, mask=mask, is_causal=is_causal)
    kernel, bias = params["out"]
    y = jax.lax.dot_general(y, kernel, (((2, 3), (0, 1)), ((), ())))
    return y + bias.reshape(1, 1, -1)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}])
@pytest.mark.parametrize("is_gradient", [False, True])
def test_program_is_no_longer_than_that_of_pure_jax(options, is_gradient):
    layer, x = make_layer(), random(2, 5, 8)
    names = "query", "key", "value", "out"
    params = {
        n: [getattr(layer, n).kernel[...], getattr(layer, n).bias[...]] for n in names
    }

    def lines(function, model):
        function = functools.partial(function, **options)
        if is_gradient:
            function = jax.grad(lambda m, x, f=function: f(m, x).sum())
        return len(jax.jit(function).lower(model, x).as_text().splitlines())

    ours = lines(lambda m, x, **options: m(x, **options), layer)
    assert ours <= lines(pure_layer, params)


def test_shardings_reach_projections_and_output():
    seen = []

    def attention_fn(query, key, value, **options):
        seen.extend(jax.typeof(x).sharding.spec for x in (query, key, value))
        return nnx.dot_product_attention(query, key, value, **options)

    layer, x = make_layer(attention_fn=attention_fn), random(2, 4, 8)
    expected = layer(x)
    heads, features = jax.P(None, None, "x", None), jax.P(None, None, "x")
    with jax.set_mesh(mesh_of("Explicit", x=2)):
        call = jax.jit(lambda m, x: m(x, qkv_sharding=heads, out_sharding=features))
        y = call(layer, jnp.array(x))
    assert seen[3:] == [heads] * 3
    assert jax.typeof(y).sharding.spec == features
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_layer_with_rotary_positions_can_be_pickled_and_jitted():
    rope = nnx.RoPE(embedding_size=2, max_seq_len=8)
    attention_fn = functools.partial(nnx.dot_product_attention_with_rope, rope=rope)
    layer, x = make_layer(attention_fn=attention_fn), random(2, 3, 8)
    y = layer(x)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(layer))(x), y)
    np.testing.assert_allclose(in_one_program(layer, x), y, rtol=1e-4, atol=1e-5)


# -------------------------------------------------------------------------------- views


def test_view_sets_modes_and_makes_a_cache_from_both_sizes():
    layer = make_layer(dropout_rate=0.5, decode=None)
    view = nnx.view(layer, deterministic=True, decode=True)
    assert (view.deterministic, view.decode) == (True, True)
    assert (layer.deterministic, layer.decode, view.cached_key) == (None, None, None)
    view = nnx.view(layer, batch_size=2, max_length=5)
    assert view.cached_key.shape == view.cached_value.shape == (2, 5, 4, 2)
    assert layer.cached_key is None


def test_one_size_alone_makes_no_cache_and_a_view_keeps_one_that_exists():
    layer = make_layer()
    for sizes in ({"batch_size": 3}, {"max_length": 7}):
        layer.set_view(decode=True, **sizes)
        assert layer.cached_key is None
    layer.set_view(batch_size=(2, 3), max_length=5)
    cached = layer.cached_key
    assert cached.shape == (2, 3, 5, 4, 2)
    layer.set_view(batch_size=1, max_length=9)
    assert layer.cached_key is cached
    info = nnx.view_info(make_layer())
    for name in ("decode", "batch_size", "max_length"):
        assert f"\n  {name}: " in info
