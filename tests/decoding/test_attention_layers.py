"""MultiHeadAttention with caches: what a layer has, with each way to use it.

A layer with one option, or with a pair of them, computes what NumPy computes in float64
(`expected_of`); and however its tokens come, with any cache, the same.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import meshes, tables
from tests.comparisons import unchanged
from tests.contract.test_nn_layers.test_attention import attention, rotated
from tests.random_arrays import random

BATCH, LENGTH, HEADS, SIZE, FEATURES = 2, 12, 4, 4, 8
PREFIX = np.array([3, 5])
SEGMENTS = np.array([[1] * 5 + [2] * 7, [1] * 2 + [4] * 6 + [3] * 4])
RESTARTING = np.array([[*range(5), *range(7)], [*range(2), *range(6), *range(4)]])
MASK = (np.random.default_rng(6).random((BATCH, 1, LENGTH, LENGTH)) < 0.7) | np.eye(
    LENGTH, dtype=bool
)


class Slopes(nnx.Module):
    """A bias for each head that falls with the distance, as in ALiBi."""

    def __init__(self):
        self.slopes = nnx.Param(jnp.array([0.5, -0.25, 0.125, 1.0]))

    def __call__(self, query_positions, key_positions):
        distance = query_positions[:, None, :, None] - key_positions[:, None, None]
        return -self.slopes[...].reshape(1, -1, 1, 1) * jnp.abs(distance)


def even_or_near(query_positions, key_positions):
    """A mask by positions: each token sees itself, and the even ones."""
    q, k = query_positions[:, None, :, None], key_positions[:, None, None]
    return (k % 2 == 0) | (q == k)


def growing(positions):
    """A factor of the dot products for each query, by its position."""
    return 0.5 + 0.1 * positions


# What a layer is made with, and what its calls get. Those over all tokens are cut.
LAYERS = {
    "rope": {"rope": nnx.RoPE(theta=50.0)},
    "window": {"sliding_window": 4},
    "cap": {"logits_soft_cap": 0.7},
    "scale": {"scale": 0.9},
    "scale rule": {"scale": growing},
    "sinks": {"use_sinks": True},
    "rms": {"normalize_qk": functools.partial(nnx.RMSNorm, epsilon=1e-3)},
    "rms all": {"normalize_qk": nnx.RMSNorm, "normalize_qk_axes": (-2, -1)},
    "layer norm": {"normalize_qk": True},
    "grouped": {"num_kv_heads": 2},
    "value size": {"value_head_dim": 3},
    "biases": {"use_bias": ("query", "value", "out")},
}
CALLS = {
    "segments": {"segment_ids": SEGMENTS, "positions": RESTARTING},
    "mask": {"mask": MASK},
    "mask rule": {"mask": even_or_near},
    "bias": {"bias": Slopes()},
    "prefix": {"prefix_lengths": PREFIX},
}
NAMES = [*LAYERS, *CALLS]
PAIRS = [
    pair
    for pair in itertools.combinations(NAMES, 2)
    if not {*pair} <= {"rms", "rms all", "layer norm"}
    and not {*pair} <= {"mask", "mask rule"}
    and not {*pair} <= {"scale", "scale rule"}
]
WAYS = {"whole": (12,), "chunks": (5, 1, 6), "tokens": (1,) * 12}
CACHES = {"full": {}, "ring": {"sliding_window": 4}}
X = np.asarray(random(BATCH, LENGTH, FEATURES))


def make_layer(names, **more):
    options = {"num_kv_heads": 4, "use_bias": True}
    for name in names:
        options |= LAYERS.get(name, {})
    numbers = np.random.default_rng(0)

    def initializer(key, shape, dtype):
        return jnp.asarray(numbers.normal(scale=0.5, size=shape), dtype)

    options |= {"kernel_init": initializer, "bias_init": initializer}
    layer = nnx.MultiHeadAttention(
        HEADS, FEATURES, HEADS * SIZE, **options | more, decode=False, rngs=nnx.Rngs(0)
    )
    for x in (layer.query_ln, layer.key_ln):
        if x is not None:
            x.scale[...] = initializer(None, x.scale.shape, x.scale.dtype)
    if layer.sinks is not None:
        layer.sinks[...] = random(HEADS, seed=4)
    return layer


def call_of(names):
    call = {"positions": np.tile(np.arange(LENGTH), (BATCH, 1))}
    for name in names:
        call |= CALLS.get(name, {})
    return call


def normalized(layer, norm, x):
    if norm is None:
        return x
    scale = np.asarray(norm.scale[...], float)
    if isinstance(norm, nnx.LayerNorm):
        x = x - x.mean(-1, keepdims=True)
    axes = norm.feature_axes if isinstance(norm.feature_axes, tuple) else (-1,)
    x = x / np.sqrt((x**2).mean(axes, keepdims=True) + norm.epsilon)
    return x * scale.reshape(x.shape[-len(axes) :])


def visible(layer, positions, segment_ids=None, prefix_lengths=None, mask=None):
    q, k = positions[:, :, None], positions[:, None]
    sees = k <= q
    if layer.sliding_window is not None:
        sees &= k > q - layer.sliding_window
    if prefix_lengths is not None:
        prefix = prefix_lengths[:, None, None]
        sees |= (q < prefix) & (k < prefix)
    if segment_ids is not None:
        sees &= segment_ids[:, :, None] == segment_ids[:, None]
    sees = sees[:, None]
    if callable(mask):
        mask = np.asarray(mask(positions, positions))
    return sees if mask is None else sees & mask


def expected_of(layer, x, positions, bias=None, **pattern):
    """What the layer computes for whole sequences, in NumPy."""

    def project(name, x):
        part = getattr(layer, name)
        y = np.einsum("...i,ihd->...hd", x, np.asarray(part.kernel[...], float))
        return y if part.bias is None else y + np.asarray(part.bias[...], float)

    def turned(norm, y):
        y = normalized(layer, norm, y)
        if layer.rope is None:
            return y
        y, theta = np.swapaxes(y, 1, 2), layer.rope.theta
        return np.swapaxes(rotated(y, positions[:, None], theta), 1, 2)

    x, scale = np.asarray(x, float), layer.scale
    query = turned(layer.query_ln, project("query", x))
    if callable(scale):
        query, scale = query * scale(positions)[..., None, None], 1.0
    heads = attention(
        query,
        turned(layer.key_ln, project("key", x)),
        project("value", x),
        mask=visible(layer, positions, **pattern),
        bias=None if bias is None else bias(positions, positions),
        scale=scale,
        logits_soft_cap=layer.logits_soft_cap,
        sinks=None if layer.sinks is None else layer.sinks[...],
    )
    y = np.einsum("...hd,hdo->...o", heads, np.asarray(layer.out.kernel[...], float))
    return y if layer.out.bias is None else y + np.asarray(layer.out.bias[...], float)


@nnx.jit(static_argnames="names")
def full(layer, x, call, names):
    return layer(x, is_causal=True, **call, **own(names))


@nnx.jit(static_argnames="names")
def step(layer, x, cache, call, names):
    return layer(x, cache=cache, **call, **own(names))


def own(names):
    """Arguments that are functions, and not traced."""
    return {"mask": even_or_near} if "mask rule" in names else {}


def traced(call):
    """The others."""
    return {key: x for key, x in call.items() if x is not even_or_near}


def in_parts(layer, cache, lengths, call, names=(), x=X):
    """The results of chunks of these lengths, one after the other."""
    results, start = [], 0
    for length in lengths:
        at = slice(start, start + length)
        part = traced(call)
        for name in ("positions", "segment_ids"):
            part |= {name: part[name][:, at]} if name in part else {}
        part |= {"mask": part["mask"][:, :, at]} if "mask" in part else {}
        results.append(step(layer, x[:, at], cache, part, names))
        start += length
    return np.concatenate(results, axis=1)


def check_close(y, expected, tolerance=2e-5):
    np.testing.assert_allclose(y, expected, rtol=tolerance, atol=tolerance)


def by_turns(cases, step):
    """All cases, those between each ``step`` only in long tests."""
    return [
        pytest.param(*case, marks=[pytest.mark.long] if i % step else [])
        for i, case in enumerate(cases)
    ]


@pytest.mark.parametrize("names", by_turns([(pair,) for pair in PAIRS], 5))
def test_each_pair_of_options_is_its_formula(names):
    layer, call = make_layer(names), call_of(names)
    y = full(layer, X, traced(call), names)
    check_close(y, expected_of(layer, X, **call))


FEW = [(name,) for name in NAMES] + [
    tuple(NAMES[(i + step) % len(NAMES)] for step in (0, 3, 7)) for i in range(16)
]


@pytest.mark.parametrize(
    ("names", "kind", "way"), by_turns(itertools.product(FEW, CACHES, WAYS), 5)
)
def test_with_a_cache_tokens_may_come_in_parts(names, kind, way):
    layer, call = make_layer(names, **CACHES[kind]), call_of(names)
    expected = expected_of(layer, X, **call)
    is_packed = "segment_ids" in call
    cache = layer.make_cache(BATCH, LENGTH, packed=is_packed)
    assert cache.is_ring == (layer.sliding_window is not None)
    if (cache.is_ring or is_packed) and "mask" in names:
        with pytest.raises(ValueError, match=r"the mask doesn't fit.*\n.*\n.*function"):
            in_parts(layer, cache, WAYS[way], call, names)
        return
    lengths = WAYS[way]
    if "prefix" in names and way == "tokens":
        lengths = (5, *(1,) * 7)  # all of the prefix at once
    if "prefix" in names and is_packed:
        lengths = WAYS["whole"]
    check_close(in_parts(layer, cache, lengths, call, names), expected)


# ----------------------------------------------------------------------- packed rows


@pytest.mark.parametrize("with_prefix", [False, True])
def test_a_packed_row_is_its_parts_and_gradients_are_theirs(with_prefix, float64):
    layer = make_layer(
        ["rope", "grouped", "rms"], sliding_window=4, param_dtype=jnp.float64
    )
    x, bias = random(BATCH, LENGTH, FEATURES, dtype=float), Slopes()
    prefix = {"prefix_lengths": np.where(SEGMENTS == 1, 2, 3)} if with_prefix else {}

    def packed(layer, bias):
        y = layer(
            x,
            is_causal=True,
            segment_ids=SEGMENTS,
            positions=RESTARTING,
            bias=bias,
            **prefix,
        )
        return jnp.sin(y).sum(), y

    def parts(layer, bias):
        rows = []
        for row, segments in zip(x, SEGMENTS, strict=True):
            for segment in dict.fromkeys(segments.tolist()):
                own = {"prefix_lengths": np.array([2 if segment == 1 else 3])}
                part = row[None, segments == segment]
                own = own if with_prefix else {}
                rows.append(layer(part, is_causal=True, bias=bias, **own)[0])
        y = jnp.concatenate(rows).reshape(x.shape)
        return jnp.sin(y).sum(), y

    grad = nnx.jit(
        lambda f, *args: nnx.value_and_grad(f, argnums=(0, 1), has_aux=True)(*args),
        static_argnums=0,
    )
    (loss, y), grads = grad(packed, layer, bias)
    (same_loss, same), same_grads = grad(parts, layer, bias)
    check_close(y, same, 1e-12)
    check_close(loss, same_loss, 1e-12)
    jax.tree.map(lambda *x: check_close(*x, 1e-11), grads, same_grads)


@pytest.mark.long
def test_sequences_of_a_row_may_go_on_by_turns():
    layer, cache = make_layer(["rope"]), None
    cache = layer.make_cache(1, 12, packed=True)
    tokens = [X[:1, :5], X[1:, :4]]
    expected = [layer(x, is_causal=True) for x in tokens]
    turns = [(0, 3), (1, 2), (0, 1), (1, 1), (1, 1), (0, 1)]
    begun, results = [0, 0], [[], []]
    for which, count in turns:
        at = np.arange(begun[which], begun[which] + count)[None]
        y = layer(
            tokens[which][:, at[0]],
            positions=at,
            cache=cache,
            segment_ids=np.full_like(at, which),
        )
        results[which].append(y)
        begun[which] += count
    for y, same in zip(results, expected, strict=True):
        check_close(np.concatenate(y, axis=1), same)


@pytest.mark.long
def test_padding_takes_no_slot_of_a_packed_row():
    layer = make_layer([])
    cache = layer.make_cache(1, 4, packed=True)
    positions = np.array([[-1, 0, 1, -1]])
    layer(X[:1, :4], positions=positions, cache=cache, segment_ids=np.ones((1, 4), int))
    np.testing.assert_array_equal(cache.positions, [[0, 1, -1, -1]])
    y = layer(
        X[:1, 4:5], positions=np.array([[2]]), cache=cache, segment_ids=np.array([[1]])
    )
    check_close(y[0], layer(X[:1, [1, 2, 4]], is_causal=True)[0, 2:])


# ------------------------------------------------------------------- cross attention

ENCODED = np.asarray(random(BATCH, 7, FEATURES, seed=3))
CROSS = ["cap", "scale", "sinks", "rms", "rms all", "grouped", "value size", "biases"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CROSS)
def test_keys_of_an_encoder_are_computed_once(name, way):
    layer = make_layer([name])
    expected = layer(X, ENCODED, bias=Slopes())
    keys, start = layer.project_kv(ENCODED), 0
    call = nnx.jit(
        lambda layer, x, keys, at: layer(x, keys, bias=Slopes(), positions=at)
    )
    for length in WAYS[way]:
        at = np.arange(start, start + length)
        check_close(call(layer, X[:, at], keys, at), expected[:, at])
        start += length


@pytest.mark.long
def test_padding_and_segments_of_an_encoder_go_with_its_keys():
    layer = make_layer(["rope"])
    segments = np.array([[1, 1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 4, 4, 3]])
    at = np.tile(np.arange(7), (2, 1))
    at[1, 3] = -1
    keys = layer.project_kv(ENCODED, positions=at, segment_ids=segments)
    y = layer(X, keys, segment_ids=SEGMENTS)
    for row, number in ((0, 1), (1, 1), (1, 4)):
        own = (segments[row] == number) & (at[row] >= 0)
        few = layer.project_kv(ENCODED[row, own][None], positions=at[row, own][None])
        same = layer(X[row][None], few)[0]
        check_close(y[row, SEGMENTS[row] == number], same[SEGMENTS[row] == number])


# -------------------------------------------------------------- transforms and devices


@pytest.mark.parametrize("kind", CACHES)
def test_half_precision_stays_half_with_a_cache(kind):
    layer = make_layer(["rope", "sinks", "rms"], dtype=jnp.bfloat16, **CACHES[kind])
    call = call_of([])
    cache = layer.make_cache(BATCH, LENGTH)
    assert cache.key.dtype == cache.value.dtype == jnp.bfloat16
    y = in_parts(layer, cache, (5, 1, 6), call)
    assert y.dtype == jnp.bfloat16
    expected = expected_of(layer, X, **call)
    np.testing.assert_allclose(np.float32(y), expected, rtol=0.06, atol=0.06)


@pytest.mark.parametrize("names", [["segments"], ["prefix", "rope"], ["bias"]])
def test_gradients_with_remat_and_a_cache_are_those_of_the_whole(names, float64):
    layer = make_layer(names, param_dtype=jnp.float64)
    x, call = random(BATCH, LENGTH, FEATURES, dtype=float), call_of(names)

    def whole(layer):
        return jnp.sin(layer(x, is_causal=True, **call)).sum()

    def in_two(layer):
        cache = layer.make_cache(BATCH, LENGTH, packed="segments" in names)

        @nnx.remat
        def part(layer, cache, x, call):
            return layer(x, cache=cache, **call, **rules)

        rules = {key: z for key, z in call.items() if key in ("bias", "prefix_lengths")}
        by_token = {key: z for key, z in call.items() if key not in rules}
        total = 0.0
        for at in (slice(6), slice(6, 12)):
            own = {key: z[:, at] for key, z in by_token.items()}
            total += jnp.sin(part(layer, cache, x[:, at], own)).sum()
        return total

    found = nnx.jit(nnx.value_and_grad(in_two))(layer)
    expected = nnx.jit(nnx.value_and_grad(whole))(layer)
    jax.tree.map(lambda *x: check_close(*x, 1e-11), found, expected)


@pytest.mark.long
def test_a_cache_in_vmap_is_one_for_each():
    layer = make_layer(["rope"])
    call = {"positions": np.arange(4)[None]}

    @nnx.vmap(in_axes=(None, 0))
    def decode(layer, x):
        cache = layer.make_cache(1, LENGTH)
        return layer(x[None, :4], cache=cache, **call)[0]

    check_close(decode(layer, X), layer(X[:, :4], is_causal=True))


@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
@pytest.mark.parametrize("names", [["rope", "segments"], ["prefix", "bias", "grouped"]])
def test_a_divided_batch_gives_the_same(names, kind):
    layer, call = make_layer(names, sliding_window=4), call_of(names)
    expected = expected_of(layer, X, **call)
    mesh = meshes.mesh_of(kind, x=2)
    with jax.set_mesh(mesh):
        put = functools.partial(jax.device_put, device=jax.P("x"))
        cache = layer.make_cache(BATCH, LENGTH, packed="segments" in names)
        by_token = {"positions", "segment_ids", "prefix_lengths"}
        call = {key: put(x) if key in by_token else x for key, x in call.items()}
        y = in_parts(layer, cache, (5, 1, 6), call, x=put(X))
    check_close(y, expected)


def test_generate_is_greedy_over_the_whole_sequence():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(30, FEATURES, rngs=rngs)
            make = functools.partial(
                nnx.MultiHeadAttention, HEADS, FEATURES, decode=False
            )
            options = {"num_kv_heads": 2, "rope": nnx.RoPE(), "rngs": rngs}
            self.own = make(sliding_window=3, **options)
            self.cross = make(rngs=rngs)
            self.encoded = nnx.Variable(jnp.asarray(ENCODED))

        def init_cache(self, batch, max_length):
            keys = self.cross.project_kv(self.encoded[:batch])
            return {"own": self.own.make_cache(batch, max_length), "cross": keys}

        def __call__(self, tokens, *, positions=None, cache=None):
            cache = cache or {"own": None, "cross": self.encoded[: len(tokens)]}
            x = self.embed(tokens)
            x += self.own(x, is_causal=True, positions=positions, cache=cache["own"])
            return self.embed.attend(x + self.cross(x, cache["cross"]))

    model, prompts = Model(nnx.Rngs(0)), [[3, 1, 4, 1, 5], [9, 2]]
    made = nnx.decoding.generate(model, prompts, max_new_tokens=6)
    whole = nnx.jit(lambda model, tokens: model(tokens))
    tokens = np.zeros((2, 16), int)
    for row, (prompt, new) in enumerate(zip(prompts, made.lists(), strict=True)):
        tokens[row, : len(prompt) + 6] = prompt + new
    logits = whole(model, tokens)
    for row, prompt in enumerate(prompts):
        at = np.arange(len(prompt), len(prompt) + 6)
        assert logits[row, at - 1].argmax(-1).tolist() == tokens[row, at].tolist()


# ------------------------------------------------- Flax's cache, which the layer owns


@pytest.mark.parametrize("name", LAYERS)
def test_the_layers_own_cache_takes_the_options_of_the_layer(name):
    layer = make_layer([name])
    expected = expected_of(layer, X, **call_of([]))
    layer.init_cache((BATCH, LENGTH, FEATURES))
    decode = nnx.jit(lambda layer, x: layer(x, decode=True))
    y = [decode(layer, X[:, t : t + 1]) for t in range(LENGTH)]
    check_close(np.concatenate(y, axis=1), expected)


@pytest.mark.parametrize("window", [None, 3])
def test_positions_only_rotate_where_the_layer_has_its_own_cache(window):
    layer = make_layer(["rope"], sliding_window=window)
    expected = layer(X, is_causal=True)
    decode = nnx.jit(lambda layer, x, at: layer(x, decode=True, positions=at))
    for start in (-2, 0.5, 3):  # distances alone count
        layer.init_cache((BATCH, LENGTH, FEATURES))
        tokens = [(X[:, t : t + 1], jnp.array([start + t])) for t in range(LENGTH)]
        y = [decode(layer, *token) for token in tokens]
        check_close(np.concatenate(y, axis=1), expected)


@pytest.mark.parametrize("window", [None, 3])
def test_positions_of_all_rows_may_be_given_once_and_there_may_be_no_token(window):
    layer = make_layer(["rope"], sliding_window=window)
    cache = layer.make_cache(BATCH, LENGTH)
    y = layer(X[:, :0], positions=jnp.zeros(0, int), cache=cache)
    assert y.shape == (BATCH, 0, FEATURES)
    parts = [[*range(5)], [*range(5, LENGTH)]]
    y = [layer(X[:, jnp.array(x)], positions=x, cache=cache) for x in parts]
    check_close(np.concatenate(y, axis=1), layer(X, is_causal=True))


# ----------------------------------------------------------------------------- errors


def rotary():
    return functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE())


@tables.cases(
    "options, call, message",
    ({}, {"decode": True}, r"own cache, and takes no(.|\n)*make_cache"),
    (
        {},
        {"cache": None, "decode": True, "segment_ids": np.ones((2, 3), int)},
        "own cache, and takes no",
    ),
    ({}, {"positions": None}, "needs positions with a cache"),
    (
        {},
        {"segment_ids": np.ones((2, 3), int)},
        r"packed KeyValueCache needs segment_ids.*\n.*packed=True",
    ),
    (
        {},
        {
            "segment_ids": np.ones((2, 3), int),
            "cache": None,
            "inputs_k": X[:, :3],
        },
        r"queries have segment_ids, but the keys have none(.|\n)*project_kv",
    ),
    (
        {"rope": nnx.RoPE()},
        {"cache": None, "inputs_k": X[:, :3] + 1},
        r"positions it doesn't know.*\n.*project_kv",
    ),
    (
        {"attention_fn": rotary()},
        {},
        r"doesn't know the positions of keys in a cache.*\n.*rope=",
    ),
    ({}, {"cache": None, "prefix_lengths": [1, 1]}, "need is_causal=True"),
    (
        {},
        {"prefix_lengths": [1, 5]},
        r"ends within a prefix(.|\n)*\[1, 5\], positions up to \[2, 2\]\n.*one call",
    ),
    ({"sliding_window": 2}, {"cache": None}, "needs is_causal=True"),
    (
        {},
        {"cache": None, "positions": [0, 1], "bias": Slopes()},
        r"positions of attention must be integers.*\[2, 3\].*\[2\]",
    ),
    ({}, {"mask": np.ones((1, 1, 3, 3))}, "mask doesn't fit a cache with 12 slots"),
)
def test_what_does_not_go_together_is_an_error_before_anything_changes(
    options, call, message
):
    layer = make_layer([], **options)
    layer.init_cache((BATCH, LENGTH, FEATURES))
    cache = layer.make_cache(BATCH, LENGTH)
    call = {"positions": np.tile(np.arange(3), (2, 1)), "cache": cache} | call
    with unchanged(layer), unchanged(cache), pytest.raises(ValueError, match=message):
        layer(X[:, :3], **call)


@tables.cases(
    "options, message",
    ({"use_bias": "query"}, r"use_bias='query'.*\n.*names of the projections"),
    ({"use_bias": ("q",)}, "use_bias="),
    ({"rope": nnx.RoPE(), "attention_fn": rotary()}, r"rotate twice.*\n.*rope= only"),
)
def test_what_a_layer_can_not_have(options, message):
    with pytest.raises(ValueError, match=message):
        make_layer([], **options)


def test_a_rule_gets_the_positions_of_queries_then_those_of_keys():
    layer, keys = make_layer([]), random(BATCH, 5, FEATURES)
    visible = np.arange(3)[:, None] >= np.arange(5)

    def rule(query_positions, key_positions):
        return query_positions[:, None, :, None] >= key_positions[:, None, None]

    expected = layer(X[:, :3], keys, mask=visible[None, None])
    np.testing.assert_array_equal(layer(X[:, :3], keys, mask=rule), expected)
