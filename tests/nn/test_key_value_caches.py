"""Decoding token by token: what the cache holds, and that nothing is lost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import catalog, tables
from tests.nn.attention_formulas import make_layer
from tests.programs import in_one_program
from tests.random_arrays import random


def rotary(**sizes):
    return functools.partial(
        nnx.dot_product_attention_with_rope, rope=nnx.RoPE(**sizes)
    )


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


def check_same(state, before):
    jax.tree.map(np.testing.assert_array_equal, state, before)


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
    assert len(traces) == 1
    assert layer.cache_index[...] == 4


def test_decoding_in_a_scan():
    layer, x = make(attention_fn=rotary()), random(2, 4, 8)

    @nnx.scan(in_axes=(nnx.Carry, 1), out_axes=(nnx.Carry, 1))
    def steps(layer, token):
        return layer, layer(token[:, None], decode=True)[:, 0]

    full = in_one_program(layer, x, decode=False, is_causal=True)
    check_equal(steps(layer, x)[1], full)


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
    layer.init_cache((2, 4, 8), jnp.float64)
    check_equal(decode(layer, x), full, 1e-12)


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
    check_equal(
        decode(make(attention_fn=nnx.dot_product_attention), x), decode(make(), x)
    )


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
    layer(random(2, 1, 8), decode=True)
    before, x = catalog.state_of(layer), random(*shape)
    if "inputs_v" in call:
        call = {"inputs_k": x, **call}
    with pytest.raises((ValueError, TypeError), match=message):
        layer(x, decode=True, **call)
    check_same(catalog.state_of(layer), before)


def test_full_cache_is_an_error():
    layer, x = make(max_length=2), random(2, 3, 8)
    decode(layer, x[:, :2])
    before = catalog.state_of(layer)
    with pytest.raises(ValueError, match=r"cache.* is full.*max_length is 2"):
        layer(x[:, 2:], decode=True)
    check_same(catalog.state_of(layer), before)


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
