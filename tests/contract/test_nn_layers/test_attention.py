"""Dot-product attention against NumPy in float64, its masks, and rotary positions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

import graftree as nnx
from tests import meshes, programs, tables
from tests.random_arrays import random, random_mask


def exact_weights(
    query,
    key,
    bias=None,
    mask=None,
    is_causal=False,
    scale=None,
    sliding_window=None,
    logits_soft_cap=None,
    sinks=None,
    key_value_seq_lengths=None,
):
    """The attention weights, with a key head per query head."""
    query, key = np.asarray(query, float), np.asarray(key, float)
    key = np.repeat(key, query.shape[-2] // key.shape[-2], axis=-2)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    logits = np.einsum("...qhd,...khd->...hqk", query, key) * scale
    if logits_soft_cap is not None:
        logits = logits_soft_cap * np.tanh(logits / logits_soft_cap)
    logits = logits if bias is None else logits + np.asarray(bias, float)
    visible = np.ones(logits.shape, bool)
    queries, keys = np.indices(logits.shape[-2:])
    if is_causal:
        visible &= keys <= queries
    if sliding_window is not None:
        visible &= keys > queries - sliding_window
    if key_value_seq_lengths is not None:
        visible &= keys < np.asarray(key_value_seq_lengths)[..., None, None, None]
    if mask is not None:
        mask = np.asarray(mask, bool)
        visible &= mask.reshape(mask.shape[-logits.ndim :])  # without surplus axes
    # Finite: where nothing is visible, all counts alike.
    logits = np.where(visible, logits, -1e300)
    if sinks is None:
        return special.softmax(logits, axis=-1)
    column = np.asarray(sinks, float)[:, None, None]
    column = np.broadcast_to(column, (*logits.shape[:-1], 1))
    return special.softmax(np.concatenate([logits, column], axis=-1), -1)[..., :-1]


def average(weights, value):
    """The values, averaged with the weights."""
    value = np.asarray(value, float)
    value = np.repeat(value, weights.shape[-3] // value.shape[-2], axis=-2)
    return np.einsum("...hqk,...khd->...qhd", weights, value)


def attention(query, key, value, **options):
    """Dot-product attention."""
    return average(exact_weights(query, key, **options), value)


def make_layer(num_heads=4, in_features=8, *args, **options):
    """A MultiHeadAttention with biases that are not zero."""
    numbers = np.random.default_rng(0)

    def initializer(key, shape, dtype):  # as `random`: compiles nothing
        return jnp.asarray(numbers.normal(scale=0.5, size=shape), dtype)

    defaults = {"decode": False, "kernel_init": initializer, "bias_init": initializer}
    return nnx.MultiHeadAttention(
        num_heads, in_features, *args, **defaults | options, rngs=nnx.Rngs(0)
    )


def params_of(layer):
    """The Params of a layer by their dotted paths."""
    return {
        ".".join(path): np.asarray(variable[...], float)
        for path, variable in nnx.to_flat_state(nnx.state(layer, nnx.Param))
    }


def layer_output(layer, inputs_q, inputs_k=None, **options):
    """What a MultiHeadAttention with these Params computes."""
    params = params_of(layer)
    inputs_k = inputs_q if inputs_k is None else inputs_k

    def project(name, x):
        kernel, bias = params[f"{name}.kernel"], params[f"{name}.bias"]
        y = np.einsum("...i,ihd->...hd", np.asarray(x, float), kernel) + bias
        scale = params.get(f"{name}_ln.scale")
        if scale is None:
            return y
        y = y - y.mean(-1, keepdims=True)
        return y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) * scale

    heads = attention(
        project("query", inputs_q),
        project("key", inputs_k),
        project("value", inputs_k),
        **options,
    )
    kernel, bias = params["out.kernel"], params["out.bias"]
    return np.einsum("...hd,hdo->...o", heads, kernel) + bias


weights_of = nnx.nn.attention.dot_product_attention_weights


def qkv(batch=(2,), heads=4, kv_heads=4, v_heads=None, depth=8, v_depth=None):
    """Queries, keys and values: 3 queries, 5 keys."""
    v_heads, v_depth = v_heads or kv_heads, v_depth or depth
    return (
        random(*batch, 3, heads, depth, seed=1),
        random(*batch, 5, kv_heads, depth, seed=2),
        random(*batch, 5, v_heads, v_depth, seed=3),
    )


class Silent(nnx.Module):
    """Has the weights computed, and forgets them."""

    def sow(self, *args):
        return False


SINKS = random(4, seed=4)
PATHS = tables.cases("path", {}, {"module": Silent()}, ids=["fused", "explicit"])
LAYOUTS = [
    {"batch": (), "kv_heads": 4},
    {"batch": (2,), "kv_heads": 2},
    {"batch": (2, 1, 3), "kv_heads": 1},
    {"batch": (2, 0), "kv_heads": 4},
]
TRIANGLE = np.tril(np.ones((1, 3, 5)))
# Sizes of the operands, options of the call.
FORMULAS = [
    *((sizes, {"is_causal": is_causal}) for sizes in LAYOUTS for is_causal in (0, 1)),
    # Masks and biases broadcast over any axes.
    *(
        (
            {"batch": (2, 3), "kv_heads": 2},
            {
                "mask": random_mask(*shape),
                "bias": np.asarray(random(*shape, seed=8)),
                "is_causal": is_causal,
            },
        )
        for shape, is_causal in [
            ((2, 1, 1, 3, 5), False),
            ((1, 3, 4, 1, 5), True),
            ((4, 1, 1), False),
            ((5,), True),
        ]
    ),
    # Masks may have any dtype, and surplus axes of size one.
    ({"batch": ()}, {"mask": np.float32(TRIANGLE)}),
    ({"batch": ()}, {"mask": np.int32(TRIANGLE)[None]}),
    ({"batch": ()}, {"mask": np.bool_(TRIANGLE)[None, None]}),
    # Values have their own depth and number of heads.
    *(
        (
            {"batch": (2, 3), "kv_heads": 2, "v_depth": depth, "v_heads": heads},
            {"is_causal": True},
        )
        for depth, heads in [(4, 2), (16, 1), (8, 4)]
    ),
]


@PATHS
@pytest.mark.parametrize(("sizes", "options"), FORMULAS)
def test_attention_is_a_softmax_average_per_head(path, sizes, options, float64):
    arrays = [np.float64(x) for x in qkv(**sizes)]
    y = programs.in_one_program(nnx.dot_product_attention, *arrays, **options, **path)
    expected = attention(*arrays, **options)
    assert (y.dtype, y.shape) == (jnp.float64, expected.shape)
    np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_weights_are_a_softmax_per_head(sizes, float64):
    query, key, _ = (np.float64(x) for x in qkv(**sizes))
    weights = programs.in_one_program(weights_of, query, key)
    expected = exact_weights(query, key)
    assert (weights.dtype, weights.shape) == (jnp.float64, expected.shape)
    np.testing.assert_allclose(weights, expected, rtol=1e-12, atol=1e-12)


LENGTHS = {"key_value_seq_lengths": np.array([0, 5])}
MASK = np.broadcast_to((np.arange(3) != 1)[:, None], (2, 1, 3, 5))
UNSEEING = {
    "mask": (np.s_[:, 1], {"mask": MASK}),
    "lengths": (np.s_[:1], LENGTHS),
    "lengths and sinks": (np.s_[:1], {"sinks": SINKS, **LENGTHS}),
}


@PATHS
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("unseeing", "options"), UNSEEING.values(), ids=UNSEEING)
def test_queries_that_see_nothing_get_the_average_or_the_sink_and_finite_gradients(
    path, dtype, unseeing, options
):
    arrays = [x.astype(dtype) for x in qkv()]

    def loss(query, key, value):
        y = nnx.dot_product_attention(query, key, value, **options, **path)
        return (y**2).sum(), y

    grad = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))
    grads, y = jax.tree.map(lambda x: np.asarray(x, float), grad(*arrays))
    average = np.asarray(arrays[2], float).mean(axis=1, keepdims=True)
    expected = np.zeros(1) if "sinks" in options else average
    expected = np.broadcast_to(expected, y.shape)[unseeing]
    np.testing.assert_allclose(y[unseeing], expected, rtol=0.02, atol=0.02)
    assert all(np.isfinite(grad).all() for grad in grads)
    assert (grads[0][unseeing] == 0).all()


@tables.cases(
    "dtypes, dtype, expected",
    ((jnp.bfloat16,) * 3, None, jnp.bfloat16),
    ((jnp.float16,) * 3, None, jnp.float16),
    ((jnp.bfloat16, jnp.float32, jnp.bfloat16), None, jnp.float32),
    ((jnp.int32,) * 3, None, jnp.float32),
    ((jnp.float32,) * 3, jnp.float16, jnp.float16),
)
@PATHS
def test_output_dtype_is_the_common_or_the_given_one(path, dtypes, dtype, expected):
    arrays = [x.astype(d) for x, d in zip(qkv(), dtypes, strict=True)]
    y = programs.in_one_program(nnx.dot_product_attention, *arrays, dtype=dtype, **path)
    assert y.dtype == expected
    reference = attention(*(np.asarray(x, float) for x in arrays))
    np.testing.assert_allclose(y.astype(jnp.float32), reference, rtol=0.05, atol=0.05)


# ------------------------------------------------------------------ which path is taken


def lowered(*arrays, **options):
    call = functools.partial(nnx.dot_product_attention, **options)
    return jax.jit(call).lower(*arrays).as_text()


@tables.cases(
    "options",
    {},
    {"dropout_rate": 0.5, "deterministic": True},
    {"dropout_rng": jax.random.key(0)},
)
def test_fused_path_is_the_program_of_jax(options):
    arrays = qkv(kv_heads=2)
    jax_attention = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    expected = jax.jit(jax_attention).lower(*arrays).as_text()
    assert lowered(*arrays, is_causal=True, **options) == expected


@pytest.mark.parametrize("precision", ["highest", jax.lax.Precision.HIGHEST])
def test_precision_reaches_both_contractions(precision):
    program = lowered(*qkv(), precision=precision)
    assert program.count("precision = [HIGHEST, HIGHEST]") == 2
    assert lowered(*qkv()).count("precision = [DEFAULT, DEFAULT]") == 2


class Attention(nnx.Module):
    """Records its weights."""

    def __call__(self, *arrays, **options):
        return nnx.dot_product_attention(*arrays, module=self, **options)


def test_weights_are_recorded_before_dropout():
    arrays = qkv()
    options = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}
    forward = nnx.capture(Attention(), nnx.Intermediate)
    _, recorded = forward(*arrays, is_causal=True, **options)
    (weights,) = recorded["attention_weights"].get_value()
    expected = exact_weights(*arrays[:2], is_causal=True)
    np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-6)


def test_logits_beyond_float16_are_finite():
    query = jnp.full((1, 1, 4), 300.0, jnp.float16)
    key = jnp.concatenate([query, -query])
    mask = jnp.array([[[True, False]]])
    np.testing.assert_array_equal(weights_of(query, key), [[[1.0, 0.0]]])
    np.testing.assert_array_equal(weights_of(query, -key, mask=mask), [[[1.0, 0.0]]])


# ------------------------------------------------------------------------------ dropout


@tables.cases(
    "batch, broadcast, more",
    ((2, 1), True, {}),
    ((2,), False, {}),
    ((2,), True, {"sinks": SINKS, "logits_soft_cap": 2.0}),
)
def test_dropout_zeroes_weights_and_scales_up_the_rest(batch, broadcast, more):
    query, key, value = qkv(batch, kv_heads=2)
    rng, rate = jax.random.key(5), 0.25
    options = {"dropout_rng": rng, "dropout_rate": rate, "broadcast_dropout": broadcast}
    options |= more
    weights = programs.in_one_program(weights_of, query, key, **options)
    shape = (1,) * (len(batch) + 1) + (3, 5) if broadcast else weights.shape
    kept = np.broadcast_to(jax.random.bernoulli(rng, 0.75, shape), weights.shape)
    expected = exact_weights(query, key, **more) * kept / 0.75
    np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-6)
    y = programs.in_one_program(nnx.dot_product_attention, query, key, value, **options)
    value = np.repeat(np.asarray(value, float), 2, axis=-2)
    expected = np.einsum("...hqk,...khd->...qhd", expected, value)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rate", [1.0, -0.1, 1.5, float("nan"), float("inf")])
@pytest.mark.parametrize("deterministic", [True, False])
def test_rate_must_be_in_its_range_even_if_unused(rate, deterministic):
    options = {"dropout_rate": rate, "deterministic": deterministic}
    message = r"dropout_rate must be in the range \[0, 1\), got " + str(rate)
    with pytest.raises(ValueError, match=message):
        nnx.dot_product_attention(*qkv(), **options)
    with pytest.raises(ValueError, match=message):
        weights_of(*qkv()[:2], **options)


def test_active_dropout_needs_a_key_and_a_dtype_is_inexact():
    with pytest.raises(ValueError, match="dropout_rng is required"):
        nnx.dot_product_attention(*qkv(), dropout_rate=0.5)
    with pytest.raises(ValueError, match="Dtype must be inexact"):
        nnx.dot_product_attention(*qkv(), dtype=jnp.int32)


# ------------------------------------------------------------------------------- errors

q, k, v = qkv()
MISFITS = [
    ((q, k, v[0]), "q, k, v must have same rank, but got 4, 4, 3"),
    ((q, k[:1], v[:1]), "q, k, v batch dims must match"),
    ((q, k, v[:, :4]), "k, v lengths must match"),
    ((q, k[..., :6], v[..., :6]), "q, k depths must match.*8.*6"),
    ((q, k[..., :3, :], v[..., :3, :]), "must be a multiple"),
    ((q, k[..., :3, :], v[..., :3, :]), "must be multiple of"),
    ((q, k, v[..., :3, :]), r"\(4\) must be multiple of Value heads \(3\)"),
    ((q[..., :0, :], k[..., :0, :], v[..., :0, :]), "must be multiple of"),
    ((q[0, 0], k[0, 0], v[0, 0]), "rank 3 or more"),
    ((q, k[0]), "q, k must have same rank, but got 4, 3"),
    ((q, k[:1]), "q, k batch dims must match"),
    ((q, k[..., :6]), "depths must match"),
    ((q, k[..., :3, :]), r"Query heads \(4\) must be multiple of Key heads \(3\)"),
]


@PATHS
@pytest.mark.parametrize(("arrays", "message"), MISFITS)
def test_arrays_that_do_not_fit_are_refused(path, arrays, message):
    function = nnx.dot_product_attention if len(arrays) == 3 else weights_of
    with pytest.raises(ValueError, match=message):
        function(*arrays, **path)


@PATHS
@pytest.mark.parametrize("name", ["mask", "bias"])
@pytest.mark.parametrize("shape", [(2, 2, 3, 5), (3, 4), (2, 1, 1, 1, 1), (3, 1, 1, 5)])
def test_masks_that_do_not_broadcast_are_named(path, name, shape):
    message = rf"The {name} of attention must be broadcastable .* \[2, 4, 3, 5\]"
    with pytest.raises(ValueError, match=message):
        nnx.dot_product_attention(q, k, v, **{name: jnp.ones(shape)}, **path)


def test_refused_calls_record_nothing():
    class Refused(Attention):
        def __call__(self, *arrays):
            with pytest.raises(ValueError):
                super().__call__(*arrays)

    _, recorded = nnx.capture(Refused(), nnx.Intermediate)(q, k, v[..., :3, :])
    assert not recorded


# --------------------------------------------------------------------------- transforms


@pytest.mark.parametrize("axis", [0, 2])
def test_sharded_batch_or_heads_stay_sharded(axis):
    mesh = meshes.mesh_of("Explicit", x=2)
    spec = jax.P(*("x" if n == axis else None for n in range(4)))
    arrays = qkv()
    attend = functools.partial(nnx.dot_product_attention, is_causal=True)
    expected = attend(*arrays)
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x in arrays]
        y = jax.jit(attend)(*sharded)
    assert jax.typeof(y).sharding.spec == spec
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_implementation_reaches_jax_where_its_function_is_used():
    query, key, value = (x.astype(jnp.bfloat16) for x in qkv())
    attend = functools.partial(nnx.dot_product_attention, implementation="xla")
    expected = jax.nn.dot_product_attention(query, key, value, implementation="xla")
    np.testing.assert_array_equal(attend(query, key, value), expected)
    attend = functools.partial(nnx.dot_product_attention, implementation="other")
    with pytest.raises(ValueError, match="Unsupported implementation option: other"):
        attend(query, key, value)
    jax.eval_shape(functools.partial(attend, module=Silent()), query, key, value)


# ------------------------------------------------------------------------------ masks


@pytest.mark.parametrize(("batch", "extra"), [((), 0), ((2,), 1), ((2, 3), 2)])
def test_shape_has_a_head_axis_after_the_batch_and_extra_axes_before(batch, extra):
    queries, keys = jnp.ones((*batch, 4)), jnp.ones((*batch, 5))
    mask = nnx.make_attention_mask(queries, keys, extra_batch_dims=extra)
    assert mask.shape == (1,) * extra + (*batch, 1, 4, 5)
    causal = nnx.make_causal_mask(keys, extra_batch_dims=extra)
    assert causal.shape == (1,) * extra + (*batch, 1, 5, 5)


def test_attention_mask_compares_or_multiplies_each_query_with_each_key():
    documents = np.array([[0, 0, 1], [0, 1, 1]])
    mask = nnx.make_attention_mask(documents, documents, jnp.equal, dtype=bool)
    expected = documents[:, :, None] == documents[:, None]
    np.testing.assert_array_equal(mask, expected[:, None])
    mask = nnx.make_attention_mask(jnp.array([1, 0]), jnp.array([1, 1, 0]))
    np.testing.assert_array_equal(mask, [[[1, 1, 0], [0, 0, 0]]])
    assert mask.dtype == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, bool])
def test_causal_mask_is_lower_triangular_in_the_dtype(dtype):
    mask = nnx.make_causal_mask(jnp.zeros((2, 4)), dtype=dtype)
    assert mask.dtype == dtype
    np.testing.assert_array_equal(mask, np.tril(np.ones((2, 1, 4, 4), dtype)))


def test_combined_mask_is_the_logical_and_and_broadcasts():
    masks = [random_mask(*shape, seed=3) for shape in [(2, 1, 3, 4), (1, 1, 1, 4)]]
    expected = np.logical_and(*masks)
    combined = nnx.combine_masks(None, *masks, None)
    np.testing.assert_array_equal(combined, expected)
    assert combined.dtype == nnx.combine_masks(masks[0]).dtype == jnp.float32
    assert nnx.combine_masks(jnp.full((2, 3), 7), dtype=bool).dtype == bool
    assert nnx.combine_masks() is nnx.combine_masks(None, None) is None
    with pytest.raises(ValueError, match=r"masks must have same rank.*\(4, 3\)"):
        nnx.combine_masks(jnp.ones((1, 1, 2, 2)), None, jnp.ones((1, 2, 2)))


# --------------------------------------------------------------------- rotary positions


def rotated(x, positions=None, theta=10000.0):
    """The rotation in float64, pair by pair as complex numbers."""
    x = np.asarray(x, float)
    length, size = x.shape[-2:]
    positions = np.arange(length) if positions is None else np.asarray(positions, float)
    angles = positions[..., None] / theta ** (2 * np.arange(size // 2) / size)
    pairs = x[..., : size // 2] + 1j * x[..., size // 2 :]
    pairs = pairs * np.exp(1j * angles)
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


TABLE = {"embedding_size": 6, "max_seq_len": 7}
# Shape of the inputs, positions, arguments of the layer.
ROTATIONS = [
    *(
        (shape, None, {"theta": theta, **sizes})
        for shape in [(5, 6), (2, 3, 7, 6)]
        for theta in (10000.0, 500.0)
        for sizes in ({}, TABLE)
    ),
    ((2, 3, 8), [3, 0, 9], {}),
    ((2, 3, 8), [[0, 1, 2], [5, 6, 7]], {}),
    ((2, 3, 8), [[0.5, -1.5, 100.0], [0.0, 0.0, 1.0]], {}),
    ((2, 2, 3, 8), [[[0, 1, 2]], [[7, 8, 9]]], {}),
    ((3, 6), [10, 20, 30], TABLE),  # these go before the tables
]


@pytest.mark.parametrize(("shape", "positions", "options"), ROTATIONS)
def test_pairs_turn_with_the_position(shape, positions, options, float64):
    x = random(*shape, dtype=float)
    given = None if positions is None else jnp.array(positions)
    y = programs.in_one_program(nnx.RoPE(**options), x, given)
    assert y.dtype == jnp.float64
    expected = rotated(x, positions, options.get("theta", 10000.0))
    np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-12)
    narrow = nnx.eval_shape(nnx.RoPE(**options), x.astype(jnp.float32))
    assert narrow.dtype == jnp.float32


def test_tables_are_variables_that_train_with_nothing():
    rope = nnx.RoPE(embedding_size=6, max_seq_len=4)
    assert type(rope.cached_sin) is nnx.Variable
    assert rope.cached_sin.shape == rope.cached_cos.shape == (4, 3)
    angles = np.arange(4)[:, None] / 10000.0 ** (np.arange(3) / 3)
    np.testing.assert_allclose(rope.cached_sin[...], np.sin(angles), atol=1e-6)
    np.testing.assert_allclose(rope.cached_cos[...], np.cos(angles), atol=1e-6)
    assert not jax.tree.leaves(nnx.state(rope, nnx.Param))
    assert not jax.tree.leaves(nnx.state(nnx.RoPE()))


@pytest.mark.parametrize("size", [3, 0, -2])
def test_sizes_are_two_and_that_of_the_embedding_is_positive_and_even(size):
    for sizes in ({"embedding_size": 4}, {"max_seq_len": 4}, {"max_seq_len": 0}):
        with pytest.raises(ValueError, match="both `embedding_size` and `max_seq_len`"):
            nnx.RoPE(**sizes)
    with pytest.raises(ValueError, match="must be positive and even"):
        nnx.RoPE(embedding_size=size, max_seq_len=4)
    with pytest.raises(ValueError, match="must be positive and even"):
        nnx.RoPE()(jnp.ones((2, max(size, 0))))


@tables.cases(
    "shape, positions, sizes, message",
    ((2, 3, 4), jnp.arange(2), {}, "must have the same seq_len"),
    ((2, 3, 4), jnp.array(1), {}, "must have the same seq_len"),
    ((2, 3, 4), jnp.ones((1, 1, 3)), {}, "more batch axes"),
    ((8, 6), None, TABLE, r"max_seq_len=7.*length 8"),
    ((2, 4), None, TABLE, r"embedding_size=6.*size 4"),
)
def test_positions_and_tables_must_fit(shape, positions, sizes, message):
    with pytest.raises(ValueError, match=message):
        nnx.RoPE(**sizes)(jnp.ones(shape), positions)


# --------------------------------------------------------------------- attention


def over_length(x, positions=None):
    """Rotates ``[batch, length, heads, depth]`` in float64."""
    x = np.moveaxis(np.asarray(x, float), -2, -3)
    positions = None if positions is None else np.asarray(positions)[..., None, :]
    return np.moveaxis(rotated(x, positions), -3, -2)


attend = functools.partial(
    programs.in_one_program, nnx.dot_product_attention_with_rope, rope=nnx.RoPE()
)


@pytest.mark.parametrize("positions", [None, [4, 5, 9], [[0, 1, 2], [6, 8, 9]]])
def test_queries_and_keys_of_all_heads_are_rotated(positions):
    query, key = random(2, 3, 4, 6, seed=1), random(2, 3, 2, 6, seed=2)
    value = random(2, 3, 2, 6, seed=3)
    given = None if positions is None else jnp.array(positions)
    y = attend(query, key, value, input_positions=given, is_causal=True)
    rotated = over_length(query, positions), over_length(key, positions)
    expected = attention(*rotated, value, is_causal=True)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_a_rope_of_ones_own_is_called_for_attention():
    class Still(nnx.RoPE):
        def __call__(self, x, input_positions=None):
            return x

    x = random(2, 3, 1, 6)
    y = nnx.dot_product_attention_with_rope(x, x, x, rope=Still())
    np.testing.assert_array_equal(y, nnx.dot_product_attention(x, x, x))


@pytest.mark.parametrize("positions", [[7, 8], [[7, 8], [1, 3]]])
def test_positions_are_those_of_the_queries_if_there_are_more_keys(positions):
    query, key = random(2, 2, 1, 6, seed=1), random(2, 9, 1, 6, seed=2)
    y = attend(query, key, key, input_positions=jnp.array(positions))
    expected = attention(over_length(query, positions), over_length(key), key)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_half_precision_stays_half_through_attention():
    x = random(2, 3, 1, 4).astype(jnp.bfloat16)
    assert jax.eval_shape(attend, x, x, x).dtype == jnp.bfloat16
