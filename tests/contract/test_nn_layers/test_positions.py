"""RoPE as configurations name it: scaled, of a part, of neighbours, by length."""

import json
import math
import pathlib
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import programs, tables
from tests.random_arrays import random

# --------------------------------------------------------------- how far the pairs turn

SIZE = 16  # features that are rotated
SHORT = [1.0 + i / 16 for i in range(8)]
LONG = [1.0 + i * 3 / 4 for i in range(8)]
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 8.0},
    "dynamic": {"type": "dynamic", "factor": 4.0, "max_position_embeddings": 32},
    "yarn": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
}
ALL = {"none": None, **SCALINGS}
DEPENDS_ON_LENGTH = {"dynamic", "longrope"}


def turns_of(name, length, theta=10000.0, size=SIZE):
    """How far each pair turns, pair by pair in float64, and the amplitude."""
    scaling, amplitude, turns = ALL[name] or {}, 1.0, []
    factor = scaling.get("factor", 1.0)
    original = scaling.get("original_max_position_embeddings")
    if name == "dynamic":
        longer = max(length, 32) / 32
        theta *= (factor * longer - (factor - 1)) ** (size / (size - 2))
    if name == "yarn":
        amplitude = 0.1 * math.log(factor) + 1
        of_turns = [
            size * math.log(original / (2 * math.pi * n)) / (2 * math.log(theta))
            for n in (32, 1)
        ]
        first, last = max(math.floor(of_turns[0]), 0), math.ceil(of_turns[1])
    if name == "longrope":
        amplitude = math.sqrt(1 + math.log(factor) / math.log(original))
    for i in range(size // 2):
        turn = theta ** (-2 * i / size)
        if name == "linear":
            turn /= factor
        if name == "yarn":
            slowed = min(max((i - first) / (last - first), 0), 1)
            turn = (1 - slowed) * turn + slowed * turn / factor
        if name == "llama3":
            wavelength = 2 * math.pi / turn
            if wavelength > original / 1.0:
                turn /= factor
            elif wavelength >= original / 4.0:
                smooth = (original / wavelength - 1.0) / (4.0 - 1.0)
                turn = (1 - smooth) * turn / factor + smooth * turn
        if name == "longrope":
            turn /= (LONG if length > original else SHORT)[i]
        if name == "proportional" and i >= 0.25 * size / 2:
            turn = 0.0
        turns.append(turn)
    return np.array(turns), amplitude


def rotated(x, positions, turns, amplitude, interleaved=False):
    """The first pairs of ``[*batch, length, features]`` as complex numbers, turned."""
    x, pairs = np.array(x, float), len(turns)
    whole, part = x, x[..., : 2 * pairs]
    numbers = part[..., :pairs] + 1j * part[..., pairs:]
    if interleaved:
        numbers = part[..., ::2] + 1j * part[..., 1::2]
    numbers = (
        numbers * amplitude * np.exp(1j * np.asarray(positions)[..., None] * turns)
    )
    if interleaved:
        part[..., ::2], part[..., 1::2] = numbers.real, numbers.imag
    else:
        part[..., :pairs], part[..., pairs:] = numbers.real, numbers.imag
    return whole


EXACT = {"rtol": 1e-10, "atol": 1e-10}
# Share of 32 features, and whether pairs are neighbours.
SHAPES = {
    "whole": (16, {}),
    "part": (32, {"partial_rotary_factor": 0.5}),
    "neighbours": (16, {"interleaved": True}),
    "part of neighbours": (32, {"partial_rotary_factor": 0.5, "interleaved": True}),
}
POSITIONS = {
    "none": None,
    "one row": np.arange(6) + 3,
    "far": np.arange(6) * 11,
    "two rows": np.array([[0, 1, 2, 3, 4, 5], [40, 41, 42, 43, 44, 45]]),
    "restarting": np.array([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 1]]),
    "padded": np.array([[0, 1, 2, -1, -1, -1], [33, 34, 35, 36, -1, -1]]),
    "fractional": np.array([0.5, -1.5, 3.25, 4.0, 5.0, 60.5]),
}


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ALL)
def test_pairs_turn_as_far_as_the_scaling_says(name, shape, positions, float64):
    features, options = SHAPES[shape]
    at = POSITIONS[positions]
    rope = nnx.RoPE(scaling=ALL[name], **options)
    x = random(2, 6, features, dtype=float)
    y = programs.in_one_program(rope, x, None if at is None else jnp.asarray(at))
    at = np.broadcast_to(np.arange(6) if at is None else at, (2, 6))
    is_interleaved = options.get("interleaved", False)
    for row in range(2):
        turns, amplitude = turns_of(name, at[row].max() + 1)
        expected = rotated(x[row], at[row], turns, amplitude, is_interleaved)
        np.testing.assert_allclose(y[row], expected, **EXACT)
    heads = jnp.stack([x, x + 1], axis=2)
    by_head = rope.rotate_heads(heads, jnp.asarray(at))
    np.testing.assert_allclose(by_head[:, :, 0], rope(x, jnp.asarray(at)), **EXACT)


def test_pairs_turn_as_in_transformers(float64):
    path = pathlib.Path(__file__).with_name("ropes_of_transformers.json")
    for config, length, turns, factor in json.loads(path.read_text()):
        rope = nnx.RoPE.from_config(config)
        ones = jnp.repeat(jnp.array([1.0, 0.0]), SIZE // 2)
        y = np.asarray(rope(jnp.stack([ones, ones]), jnp.array([1, length - 1]))[0])
        numbers = y[: SIZE // 2] + 1j * y[SIZE // 2 :]
        # They are float32 there.
        np.testing.assert_allclose(np.angle(numbers), turns, rtol=5e-7, err_msg=config)
        np.testing.assert_allclose(np.abs(numbers), factor, rtol=5e-7, err_msg=config)


def test_yarn_slows_down_at_once_between_equal_bounds(float64):
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 200}
    scaling |= {"beta_fast": 1, "beta_slow": 1, "truncate": False}
    rope = nnx.RoPE(scaling=scaling | {"attention_factor": 1.0})
    y = rope(jnp.repeat(jnp.array([[1.0, 0.0]]), 8, axis=1), jnp.array([1.0]))[0]
    share = np.arctan2(y[8:], y[:8]) * 10000 ** (np.arange(8) / 8)
    # The pair that turns once within 200 positions would be number 3.005.
    np.testing.assert_allclose(share, [1.0] * 4 + [0.25] * 4)


@tables.cases(
    "settings, factor",
    ({}, 0.1 * math.log(40) + 1),
    ({"attention_factor": 2.0}, 2.0),
    ({"mscale": 1.0}, 0.1 * math.log(40) + 1),
    ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
    (
        {"mscale": 0.707, "mscale_all_dim": 0.5},
        (0.0707 * math.log(40) + 1) / (0.05 * math.log(40) + 1),
    ),
    ({"factor": 1.0}, 1.0),
)
def test_yarn_scales_what_is_rotated(settings, factor, float64):
    scaling = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
    rope = nnx.RoPE(scaling=scaling | settings, partial_rotary_factor=0.5)
    y = rope(jnp.ones((3, 16)))
    norms = np.hypot(y[:, :4], y[:, 4:8])
    np.testing.assert_allclose(norms, factor * math.sqrt(2), rtol=1e-12)
    np.testing.assert_array_equal(y[:, 8:], 1.0)


# ------------------------------------------------------------------- precision, tables


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", ALL)
def test_half_precision_is_rounded_once(name, dtype):
    features, options = SHAPES["part of neighbours"]
    rope = nnx.RoPE(scaling=ALL[name], **options)
    x = random(300, features).astype(dtype)
    y, full = rope(x), rope(x.astype(jnp.float32))
    assert (y.dtype, full.dtype) == (dtype, jnp.float32)
    half_unit = 0.51 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(y.astype(jnp.float32), full, rtol=half_unit, atol=1e-7)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ALL)
def test_tables_hold_what_a_call_computes(name, shape):
    features, options = SHAPES[shape]
    settings = {"scaling": ALL[name], "seq_len": 40, **options}
    table = nnx.RoPE(embedding_size=features, max_seq_len=50, **settings)
    assert table.cached_sin.shape == table.cached_cos.shape == (50, SIZE // 2)
    x = random(2, 30, features)
    np.testing.assert_allclose(table(x), nnx.RoPE(**settings)(x), rtol=1e-6, atol=1e-6)
    heads = random(2, 30, 3, features)
    y = nnx.RoPE(**settings).rotate_heads(heads)
    np.testing.assert_allclose(table.rotate_heads(heads), y, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match=rf"embedding_size={features}.*size 8"):
        table(jnp.ones((2, 8)))


# ------------------------------------------------------------------- lengths that count


def test_the_length_of_a_sequence_is_its_own():
    rope, x = nnx.RoPE(scaling=SCALINGS["dynamic"]), random(3, 6, SIZE)
    positions = jnp.asarray(np.arange(6) + np.array([[0], [30], [90]]))
    alone = [rope(x[row], positions[row]) for row in range(3)]
    np.testing.assert_allclose(rope(x, positions), jnp.stack(alone), 1e-6, 1e-6)


@pytest.mark.parametrize("name", ALL)
def test_a_fixed_length_counts_in_all_calls(name):
    fixed = nnx.RoPE(scaling=ALL[name], seq_len=48)
    x = random(1, 48, SIZE)
    whole = nnx.RoPE(scaling=ALL[name])(x)
    steps = [fixed(x[:, t : t + 1], jnp.array([t])) for t in range(48)]
    np.testing.assert_allclose(jnp.concatenate(steps, 1), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_a_cache_gives_what_the_whole_sequence_gives(name):
    rope = nnx.RoPE(scaling=ALL[name], seq_len=48, interleaved=True)
    x = random(2, 40, 3, SIZE)

    def attend(x, positions, cache):
        turned = rope.rotate_heads(x, positions)
        return nnx.decoding.attend(turned, turned, x, positions, cache)

    positions = jnp.broadcast_to(jnp.arange(40), (2, 40))
    whole = attend(x, positions, None)
    cache = nnx.decoding.KeyValueCache(2, 48, kv_heads=3, head_dim=SIZE)
    step = nnx.jit(attend)
    bounds = [(0, 30), *((t, t + 1) for t in range(30, 40))]
    parts = [step(x[:, a:b], positions[:, a:b], cache) for a, b in bounds]
    np.testing.assert_allclose(jnp.concatenate(parts, 1), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("positions", [[[31]], [[32]], [[47], [20]], None])
@pytest.mark.parametrize("name", ALL)
def test_keys_turn_by_the_length_of_the_queries(name, positions):
    rope, key = nnx.RoPE(scaling=ALL[name]), random(2, 48, 1, SIZE)
    query = random(2, 1, 1, SIZE, seed=1)
    given = None if positions is None else jnp.array(positions)
    y = nnx.dot_product_attention_with_rope(
        query, key, key, rope=rope, input_positions=given
    )
    at = np.broadcast_to([[0]] if positions is None else positions, (2, 1))
    for row in range(2):
        turns = turns_of(name, at[row].max() + 1)
        q = rotated(query[row, :, 0], at[row], *turns)
        k = rotated(key[row, :, 0], np.arange(48), *turns)
        weights = np.asarray(jax.nn.softmax(q @ k.T / math.sqrt(SIZE)))
        expected = weights @ np.asarray(key[row, :, 0])
        np.testing.assert_allclose(y[row, :, 0], expected, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------- in transforms


@pytest.mark.parametrize("name", ALL)
def test_a_scaling_is_part_of_the_structure(name):
    settings = {"partial_rotary_factor": 0.5, "interleaved": True, "seq_len": 99}
    rope, equal = (nnx.RoPE(scaling=ALL[name], **settings) for _ in range(2))
    traces = []

    @nnx.jit
    def rotate(rope, x):
        traces.append(None)
        return rope(x)

    x = random(5, 32)
    y = rotate(rope, x)
    for other in (equal, nnx.clone(rope), pickle.loads(pickle.dumps(rope))):
        np.testing.assert_array_equal(rotate(other, x), y)
        assert other.scaling == rope.scaling
    assert len(traces) == 1
    rotate(nnx.RoPE(7.0, scaling=ALL[name], **settings), x)
    assert len(traces) == 2


def test_other_lists_of_factors_are_another_structure():
    settings = SCALINGS["longrope"]
    others = settings | {"long_factor": [1.0] * 8}
    graphdefs = [nnx.graphdef(nnx.RoPE(scaling=x)) for x in (settings, others)]
    assert graphdefs[0] != graphdefs[1]
    assert graphdefs[0] == nnx.graphdef(nnx.RoPE(scaling=dict(settings)))


# ------------------------------------------------------------------- configurations

GEMMA = {
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
}
GEMMA_5 = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {"short_factor": SHORT, "long_factor": LONG}
NONE = {"rope_theta": 5e5}


@tables.cases(
    "config, layer_type, expected",
    (NONE, None, {"theta": 5e5}),
    (NONE | {"rope_scaling": None}, "full_attention", {"theta": 5e5}),
    ({"rope_parameters": {"rope_type": "default", **NONE}}, None, {"theta": 5e5}),
    (
        {"rope_parameters": {**NONE, "partial_rotary_factor": 0.25}},
        None,
        {"theta": 5e5, "partial_rotary_factor": 0.25},
    ),
    (
        NONE | {"partial_rotary_factor": 0.5, "rope_interleave": True},
        None,
        {"theta": 5e5, "partial_rotary_factor": 0.5, "interleaved": True},
    ),
    (GEMMA, "sliding_attention", {"theta": 1e4}),
    (GEMMA_5, "sliding_attention", {"theta": 1e4}),
    (GEMMA, "full_attention", {"theta": 1e6, "scaling": SCALINGS["linear"]}),
    (GEMMA_5, "full_attention", {"theta": 1e6, "scaling": SCALINGS["linear"]}),
    (
        NONE | {"rope_scaling": {"type": "yarn", **YARN, "attention_factor": None}},
        None,
        {"theta": 5e5, "scaling": {"rope_type": "yarn", **YARN}},
    ),
    (
        NONE
        | {"rope_scaling": {"type": "dynamic", "factor": 4.0}}
        | {"max_position_embeddings": 32},
        None,
        {"theta": 5e5, "scaling": SCALINGS["dynamic"]},
    ),
    (  # as Phi-3
        NONE
        | {"rope_scaling": {"type": "longrope", **LONGROPE}}
        | {"max_position_embeddings": 128, "original_max_position_embeddings": 32},
        None,
        {
            "theta": 5e5,
            "scaling": {"type": "longrope", **LONGROPE, "max_position_embeddings": 128}
            | {"original_max_position_embeddings": 32},
        },
    ),
    (
        NONE | {"rope_scaling": SCALINGS["llama3"], "max_position_embeddings": 9},
        None,
        {"theta": 5e5, "scaling": SCALINGS["llama3"]},
    ),
    (
        {"rope_parameters": SCALINGS["proportional"] | NONE},
        None,
        {"theta": 5e5, "scaling": SCALINGS["proportional"]},
    ),
)
def test_a_configuration_says_all(config, layer_type, expected):
    rope = nnx.RoPE.from_config(config, layer_type)
    if "max_position_embeddings" in config and rope.scaling is not None:
        names = {"max_position_embeddings": config["max_position_embeddings"]}
        if rope.scaling["rope_type"] in ("yarn", "longrope", "dynamic"):
            expected = expected | {"scaling": expected["scaling"] | names}
    assert nnx.graphdef(rope) == nnx.graphdef(nnx.RoPE(**expected))


def test_a_configuration_is_not_changed_and_takes_options():
    config = json.loads(json.dumps(GEMMA_5))
    rope = nnx.RoPE.from_config(config, "full_attention", interleaved=True, seq_len=7)
    assert (rope.interleaved, rope.seq_len) == (True, 7)
    assert config == GEMMA_5
    config = NONE | {"rope_interleave": True}
    assert not nnx.RoPE.from_config(config, interleaved=False).interleaved


@tables.cases(
    "scaling, message",
    ({"rope_type": "su"}, r"no scaling of the type 'su'[^.]*\.\nIts types are default"),
    ({"type": "mrope", "mrope_section": [1, 2]}, "of the type 'mrope'"),
    ({"rope_type": "linear"}, r"type 'linear'.\n  factor: missing\nIts keys are f"),
    ({"mrope_section": [2, 3]}, r"type 'default'.\n  mrope_section: unknown, \(2, 3\)"),
    (SCALINGS["linear"] | {"low": 1}, "low: unknown, 1"),
    (SCALINGS["linear"] | NONE, "rope_theta: unknown.*(.|\n)*nnx.RoPE.from_config"),
    ({"type": "dynamic", "factor": 2.0}, "max_position_embeddings: missing"),
    ({"type": "yarn", "original_max_position_embeddings": 9}, "factor: missing"),
    ({"type": "yarn", "factor": 9}, "original_max_position_embeddings: missing"),
)
def test_a_scaling_of_another_form_is_refused(scaling, message):
    with pytest.raises(ValueError, match=message):
        nnx.RoPE(scaling=scaling)


@tables.cases(
    "config, layer_type, message",
    ({"hidden_size": 3}, None, "found no rope_theta(.|\n)*no key with rope"),
    (
        {"text_config": NONE},
        None,
        r"found no rope_theta(.|\n)*config\[\"text_config\"\]",
    ),
    ({"qk_rope_head_dim": 3}, None, "config has qk_rope_head_dim"),
    (NONE | {"rotary_dim": 64}, None, "doesn't read all entries.*\n  rotary_dim: 64\n"),
    (NONE | {"rope_ratio": 2}, None, "rope_ratio: 2"),
    (NONE | {"swa_rope_theta": 1e4}, None, r"swa_rope_theta: 10000\.0"),
    (GEMMA, None, "none for None.\nPass layer_type, one of full_attention, sliding"),
    (GEMMA_5, "sliding", "none for 'sliding'"),
    (NONE | {"rope_scaling": {"type": "ntk"}}, None, "of the type 'ntk'"),
    (NONE | {"rope_scaling": {"factor": 2.0}}, None, "factor: unknown, 2.0"),
)
def test_a_configuration_that_may_mean_more_is_refused(config, layer_type, message):
    with pytest.raises(ValueError, match=message):
        nnx.RoPE.from_config(config, layer_type)


@pytest.mark.parametrize("name", sorted(DEPENDS_ON_LENGTH))
def test_sequences_may_have_no_token(name):
    x = jnp.ones((2, 0, SIZE))
    assert nnx.RoPE(scaling=ALL[name])(x).shape == x.shape


@pytest.mark.parametrize("name", sorted(DEPENDS_ON_LENGTH))
def test_there_are_no_tables_of_angles_that_depend_on_the_length(name):
    with pytest.raises(ValueError, match=f"{name} scaling depend.*\n.*seq_len=..."):
        nnx.RoPE(embedding_size=8, max_seq_len=9, scaling=ALL[name])


@pytest.mark.parametrize("share", [0.0, 0.3, 1.5, -1.0])
def test_the_rotated_part_is_even_and_not_larger_than_the_whole(share):
    rope = nnx.RoPE(partial_rotary_factor=share)
    message = f"must be positive and even.*10 and partial_rotary_factor={share}"
    with pytest.raises(ValueError, match=message):
        rope(jnp.ones((2, 10)))


@pytest.mark.parametrize("name", ["short", "long"])
def test_longrope_has_a_factor_for_each_pair(name):
    rope = nnx.RoPE(scaling=SCALINGS["longrope"] | {f"{name}_factor": [1.0] * 7})
    with pytest.raises(ValueError, match=f"{name}_factor.*each of 8 pairs.*got 7"):
        rope(jnp.ones((2, 16)))
