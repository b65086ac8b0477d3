"""MultiHeadAttention: projections, settings, views, sharding; decoding by its cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import meshes, tables
from tests.comparisons import unchanged
from tests.contract.test_nn_layers.test_attention import (
    layer_output,
    make_layer,
    params_of,
)
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
    first, second = (in_one_program(layer, x) for _ in range(2))
    assert layer.rngs.count[...] == 2 and (first != second).any()
    in_one_program(layer, x, deterministic=True)
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

    def forward(sow_weights):
        options = {"sow_weights": sow_weights, "is_causal": True}
        call = nnx.capture(lambda m, x: m(x, **options), nnx.Intermediate)
        return nnx.jit(call)(layer, x)

    y, recorded = forward(sow_weights=True)
    weights = recorded["attention_weights"][0]
    assert weights.shape == (2, 4, 3, 3)
    np.testing.assert_allclose(weights.sum(-1), np.ones((2, 4, 3)), rtol=1e-5)
    np.testing.assert_array_equal(weights, np.tril(weights))
    expected = layer_output(layer, x, is_causal=True)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    _, recorded = forward(sow_weights=False)
    assert not recorded and not hasattr(layer, "attention_weights")


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
    with jax.set_mesh(meshes.mesh_of("Explicit", x=2)):
        call = jax.jit(lambda m, x: m(x, qkv_sharding=heads, out_sharding=features))
        y = call(layer, jnp.array(x))
    assert seen[3:] == [heads] * 3 and jax.typeof(y).sharding.spec == features
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


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


# -------------------------------------------------------------- decoding token by token


def rotary(**sizes):
    rope = nnx.RoPE(**sizes)
    return functools.partial(nnx.dot_product_attention_with_rope, rope=rope)


def make(batch=(2,), max_length=4, cache_dtype=jnp.float32, **options):
    """A layer with 4 heads of size 2, and a cache."""
    layer = make_layer(decode=None, **options)
    layer.init_cache((*batch, max_length, 8), cache_dtype)
    return layer


def decode(layer, x, step=lambda layer, token: layer(token, decode=True)):
    """Feeds the tokens of a sequence one by one."""
    tokens = np.split(np.asarray(x), x.shape[-2], axis=-2)
    return np.concatenate([step(layer, jnp.asarray(token)) for token in tokens], -2)


def check_equal(decoded, full, tolerance=1e-5):
    np.testing.assert_allclose(decoded, full, rtol=tolerance, atol=tolerance)


@tables.cases(
    "batch, options",
    ((), {}),
    ((2, 3), {"num_kv_heads": 2, "normalize_qk": True}),
    ((2,), {"attention_fn": rotary()}),
    ((2,), {"attention_fn": rotary(embedding_size=2, max_seq_len=9)}),
    ((2,), {"attention_fn": rotary(), "num_kv_heads": 2}),
    ids=["plain", "grouped", "rotary", "rotary with tables", "grouped rotary"],
)
def test_token_by_token_gives_the_causal_full_pass(batch, options):
    layer, x = make(batch, max_length=6, **options), random(*batch, 4, 8)
    # Compiled as a whole: the many small operations cost more, one by one. Tests below
    # call the layer without.
    full = in_one_program(layer, x, decode=False, is_causal=True)
    check_equal(decode(layer, x, nnx.jit(lambda layer, x: layer(x, decode=True))), full)
    assert layer.cache_index[...] == 4
    layer.init_cache((*batch, 6, 8))
    causal = nnx.jit(lambda layer, x: layer(x, decode=True, is_causal=True))
    check_equal(decode(layer, x, causal), full)


def test_decoding_in_nnx_jit_traces_once_and_keeps_the_cache(mode):
    traces = []

    @nnx.jit(**mode)
    def step(layer, token):
        traces.append(1)
        return layer(token, decode=True)

    layer, x = make(attention_fn=rotary()), random(2, 4, 8)
    full = in_one_program(layer, x, decode=False, is_causal=True)
    check_equal(decode(layer, x, step), full)
    assert len(traces) == 1 and layer.cache_index[...] == 4


def test_ref_backed_cache_decodes_in_plain_jit():
    layer, x = make(), random(2, 4, 8)
    full = in_one_program(layer, x, decode=False, is_causal=True)
    layer = nnx.to_refs(layer)
    step = jax.jit(lambda layer, token: layer(token, decode=True))
    check_equal(decode(layer, x, step), full)
    assert layer.cache_index[...] == 4


def test_decoding_with_64_bit_types_on(float64):
    layer = make(param_dtype=jnp.float64, cache_dtype=jnp.float64)
    x = random(2, 4, 8, dtype=jnp.float64)
    assert layer.cache_index.dtype == jnp.int32
    step = jax.jit(lambda layer, token: (layer(token, decode=True), layer))
    full, tokens = in_one_program(layer, x, decode=False, is_causal=True), []
    for t in range(4):
        y, layer = step(layer, x[:, t : t + 1])
        tokens.append(y)
    check_equal(np.concatenate(tokens, axis=1), full, 1e-12)


@tables.cases("dtype, cache_dtype", (jnp.bfloat16, jnp.float32), (None, jnp.bfloat16))
def test_layer_and_cache_may_differ_in_dtype(dtype, cache_dtype):
    layer, x = make(dtype=dtype, cache_dtype=cache_dtype), random(2, 4, 8)
    full = in_one_program(layer, x, decode=False, is_causal=True)
    decoded = decode(layer, x, nnx.jit(lambda layer, x: layer(x, decode=True)))
    assert decoded.dtype == full.dtype
    assert layer.cached_key.dtype == layer.cached_value.dtype == cache_dtype
    check_equal(decoded.astype(float), full.astype(float), 0.05)


def test_mask_of_the_user_takes_away_more():
    layer, x = make(), random(2, 4, 8)
    padding = jnp.array([[1, 1, 1, 1], [0, 1, 1, 1]]).reshape(2, 1, 1, 4)
    mask = nnx.combine_masks(padding, nnx.make_causal_mask(x[..., 0]))
    full = in_one_program(layer, x, decode=False, mask=mask)
    step = nnx.jit(lambda layer, token: layer(token, decode=True, mask=padding))
    check_equal(decode(layer, x, step)[:, 1:], full[:, 1:])


def test_cross_attention_decodes_keys_and_values_of_their_own():
    layer, x, other = make(), random(2, 4, 8), random(2, 4, 8, seed=1)
    full = in_one_program(layer, x, other, is_causal=True, decode=False)
    step = nnx.jit(lambda layer, x: layer(*jnp.split(x, 2, -1), decode=True))
    check_equal(decode(layer, jnp.concatenate([x, other], -1), step), full)


# --------------------------------------------------------------------- positions


def test_function_with_positions_gets_the_index_and_others_do_not():
    seen = []

    def with_positions(query, key, value, input_positions=None, **options):
        seen.append(input_positions)
        return nnx.dot_product_attention(query, key, value, mask=options["mask"])

    layer, x = make(attention_fn=functools.partial(with_positions)), random(2, 3, 8)
    decode(layer, x)
    assert [list(positions) for positions in seen] == [[0], [1], [2]]
    layer(x[:, :1], decode=True, input_positions=jnp.array([7]))
    assert list(seen[-1]) == [7]
    layer(x, decode=False)
    assert seen[-1] is None
    layer = make(attention_fn=nnx.dot_product_attention)
    check_equal(decode(layer, x), decode(make(), x))


# -------------------------------------------------------- errors, nothing is lost


@tables.cases(
    "shape, call, message",
    ((2, 2, 8), {}, r"shape error, expected key shape \(2, 1, 4, 2\) .*\(2, 2,"),
    ((3, 1, 8), {}, "Autoregressive cache shape error"),
    ((1, 8), {}, "Autoregressive cache shape error"),
    ((2, 1, 8), {"mask": jnp.ones(4)}, "masks must have same rank"),
    ((2, 1, 8), {"mask": jnp.ones((2, 1, 1, 3))}, "mask|broadcast"),
    ((2, 1, 8), {"inputs_v": jnp.ones((2, 2, 8))}, "expected value shape"),
)
def test_refused_step_leaves_the_cache_untouched(shape, call, message):
    layer = make(dropout_rate=0.5, deterministic=False)
    in_one_program(layer, random(2, 1, 8), decode=True)
    x = random(*shape)
    if "inputs_v" in call:
        call = {"inputs_k": x, **call}
    with unchanged(layer), pytest.raises((ValueError, TypeError), match=message):
        layer(x, decode=True, **call)


def test_full_cache_is_an_error():
    layer, x = make(max_length=2), random(2, 3, 8)
    decode(layer, x[:, :2])
    message = r"cache.* is full.*max_length is 2"
    with unchanged(layer), pytest.raises(ValueError, match=message):
        layer(x[:, 2:], decode=True)


def test_traced_steps_beyond_the_end_replace_the_last_entry_and_are_counted():
    layer, x = make(max_length=2), random(2, 4, 8)
    decoded = decode(layer, x, nnx.jit(lambda layer, token: layer(token, decode=True)))
    assert np.isfinite(decoded).all()
    assert layer.cache_index[...] == 4 > layer.cached_key.shape[1]
    check_equal(layer.cached_key[...], layer.key(x)[:, jnp.array([0, 3])])


def test_closed_over_cache_can_not_be_written():
    layer = make()
    with pytest.raises(nnx.errors.TraceContextError, match="Cannot mutate Cache"):
        jax.jit(lambda x: layer(x, decode=True))(random(2, 1, 8))
    assert layer.cache_index[...] == 0


# ------------------------------------------------------------------------ making


def test_new_cache_is_empty_and_of_new_variables():
    layer = make((2, 3), max_length=5, num_kv_heads=2)
    old = layer.cached_key
    layer.init_cache((2, 3, 5, 8), dtype=jnp.bfloat16)
    assert layer.cached_key is not old
    assert type(layer.cached_key) is type(layer.cache_index) is nnx.Cache
    for variable in (layer.cached_key, layer.cached_value):
        assert (variable.shape, variable.dtype) == ((2, 3, 5, 2, 2), jnp.bfloat16)
        assert (variable[...] == 0).all()
    assert (layer.cache_index.shape, layer.cache_index.dtype) == ((), jnp.int32)


def test_cache_can_be_made_in_jit_with_graph_updates():
    layer = make_layer()
    nnx.jit(lambda m: m.init_cache((2, 4, 8)), graph=True, graph_updates=True)(layer)
    check_equal(decode(layer, random(2, 4, 8)), decode(make(), random(2, 4, 8)))


@pytest.mark.parametrize("shape", [(), (4,)])
def test_shape_of_a_cache_has_length_and_features(shape):
    layer = make_layer()
    with pytest.raises(ValueError, match="max_length, features"):
        layer.init_cache(shape)
    assert layer.cached_key is None


def test_a_cache_that_is_a_constant_of_the_program_is_decoded_into():
    layer, token = make(), random(2, 1, 8)
    graphdef, state = nnx.split(layer)

    @jax.jit
    def step(token):
        return nnx.merge(graphdef, state, copy=True)(token, decode=True)

    check_equal(step(token), layer(token, decode=True))
