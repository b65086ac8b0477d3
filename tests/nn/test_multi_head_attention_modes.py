"""MultiHeadAttention: dropout, recorded weights, views, sharding, its program."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests.nn.attention_formulas import layer_output, make_layer
from tests.random_arrays import random

P = jax.sharding.PartitionSpec


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


def test_other_rngs_are_refused():
    layer, x = make_layer(dropout_rate=0.5, deterministic=False), random(2, 3, 8)
    with pytest.raises(TypeError, match="rngs must be a Rngs, RngStream or None"):
        layer(x, rngs=0)
    with pytest.raises(AttributeError, match="No RngStream named 'dropout'"):
        layer(x, rngs=nnx.Rngs(params=0))
    with pytest.raises(AttributeError, match="No RngStream named 'dropout'"):
        nnx.MultiHeadAttention(2, 4, dropout_rate=0.5, rngs=nnx.Rngs(params=0))


@pytest.mark.parametrize(
    "call", [{"mask": jnp.ones((3, 4))}, {"inputs_k": jnp.ones((1, 3, 8))}]
)
def test_call_that_fails_draws_nothing(call):
    layer = make_layer(dropout_rate=0.5, deterministic=False)
    with pytest.raises(ValueError):
        layer(random(2, 3, 8), **call)
    assert layer.rngs.count[...] == 0


def test_closed_over_layer_can_not_draw():
    layer = make_layer(dropout_rate=0.5, deterministic=False)
    with pytest.raises(nnx.errors.TraceContextError, match="Cannot mutate RngCount"):
        jax.jit(lambda x: layer(x))(random(1, 3, 8))


def test_train_and_eval_switch_dropout():
    layer, x = make_layer(dropout_rate=0.5), random(1, 3, 8)
    layer.eval()
    np.testing.assert_allclose(layer(x), layer_output(layer, x), rtol=1e-4, atol=1e-5)
    layer.train()
    layer(x)
    assert layer.rngs.count[...] == 1


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

    y = jax.nn.dot_product_attention(
        project("query"),
        project("key"),
        project("value"),
        mask=mask,
        is_causal=is_causal,
    )
    kernel, bias = params["out"]
    y = jax.lax.dot_general(y, kernel, (((2, 3), (0, 1)), ((), ())))
    return y + bias.reshape(1, 1, -1)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}])
@pytest.mark.parametrize("is_gradient", [False, True])
def test_program_is_no_longer_than_that_of_pure_jax(options, is_gradient):
    layer, x = make_layer(), random(2, 5, 8)
    names = ("query", "key", "value", "out")
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
    explicit = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((2,), ("x",), axis_types=explicit)
    seen = []

    def attention_fn(query, key, value, **options):
        seen.extend(jax.typeof(x).sharding.spec for x in (query, key, value))
        return nnx.dot_product_attention(query, key, value, **options)

    layer, x = make_layer(attention_fn=attention_fn), random(2, 4, 8)
    expected = layer(x)
    heads, features = P(None, None, "x", None), P(None, None, "x")
    with jax.set_mesh(mesh):
        y = jax.jit(lambda m, x: m(x, qkv_sharding=heads, out_sharding=features))(
            layer, jnp.array(x)
        )
    assert seen[3:] == [heads] * 3
    assert jax.typeof(y).sharding.spec == features
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_layer_with_rotary_positions_can_be_pickled_and_jitted():
    rope = nnx.RoPE(embedding_size=2, max_seq_len=8)
    attention_fn = functools.partial(nnx.dot_product_attention_with_rope, rope=rope)
    layer, x = make_layer(attention_fn=attention_fn), random(2, 3, 8)
    y = layer(x)
    copy = pickle.loads(pickle.dumps(layer))
    np.testing.assert_array_equal(copy(x), y)
    np.testing.assert_allclose(
        nnx.jit(lambda m, x: m(x))(layer, x), y, rtol=1e-4, atol=1e-5
    )


# -------------------------------------------------------------------------------- views


def test_view_sets_modes_and_makes_a_cache_from_both_sizes():
    layer = make_layer(dropout_rate=0.5, decode=None)
    view = nnx.view(layer, deterministic=True, decode=True)
    assert (view.deterministic, view.decode) == (True, True)
    assert (layer.deterministic, layer.decode, view.cached_key) == (None, None, None)
    view = nnx.view(layer, batch_size=2, max_length=5)
    assert view.cached_key.shape == view.cached_value.shape == (2, 5, 4, 2)
    assert layer.cached_key is None


@pytest.mark.parametrize("sizes", [{"batch_size": 3}, {"max_length": 7}])
def test_one_size_alone_makes_no_cache(sizes):
    layer = make_layer()
    layer.set_view(decode=True, **sizes)
    assert layer.cached_key is None


def test_view_keeps_a_cache_that_exists():
    layer = make_layer()
    layer.set_view(batch_size=(2, 3), max_length=5)
    cached = layer.cached_key
    assert cached.shape == (2, 3, 5, 4, 2)
    layer.set_view(batch_size=1, max_length=9)
    assert layer.cached_key is cached


def test_view_info_describes_the_settings():
    info = nnx.view_info(make_layer())
    assert info.startswith("MultiHeadAttention:\n  deterministic: bool | None = None\n")
    for name in ("decode", "batch_size", "max_length"):
        assert f"\n  {name}: " in info
