"""Biases of attention by distance: T5's buckets, the slopes of ALiBi."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import programs, tables
from tests.random_arrays import random


def bucket_of(ahead, buckets, max_distance, bidirectional):
    """T5's bucket, in integers: no logarithm is rounded."""
    offset = 0
    if bidirectional:
        buckets //= 2
        offset = buckets if ahead > 0 else 0
    distance = abs(ahead) if bidirectional else max(-ahead, 0)
    exact = buckets // 2
    if distance < exact:
        return offset + distance
    wide = buckets - exact
    larger = [
        distance**wide * exact**j >= max_distance**j * exact**wide
        for j in range(1, wide)
    ]
    return offset + exact + sum(larger)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "longest"), [(32, 128), (8, 20), (4, 3), (32, 27)])
def test_distances_share_buckets_that_widen(buckets, longest, bidirectional):
    bias = nnx.RelativePositionBias(
        2,
        num_buckets=buckets,
        max_distance=longest,
        bidirectional=bidirectional,
        rngs=nnx.Rngs(0),
    )
    bias.embed.embedding[...] = random(buckets, 2)
    keys = np.arange(300)
    y = programs.in_one_program(bias, jnp.array([150]), jnp.asarray(keys))
    numbers = [bucket_of(int(k) - 150, buckets, longest, bidirectional) for k in keys]
    expected = np.asarray(bias.embed.embedding)[numbers].T[:, None]
    np.testing.assert_array_equal(y, expected)


def slopes_of(heads):
    """As the paper's authors compute them."""
    power = 2 ** math.floor(math.log2(heads))
    first = 2.0 ** (-8 / power)
    slopes = [first ** (i + 1) for i in range(power)]
    if power < heads:
        between = 2.0 ** (-4 / power)
        slopes += [between ** (2 * i + 1) for i in range(heads - power)]
    return np.array(slopes)


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 12, 40, 112])
def test_slopes_are_those_of_the_paper(heads):
    y = nnx.ALiBi(heads)(jnp.array([5]), jnp.arange(9))
    distances = np.abs(np.arange(9) - 5)
    expected = -slopes_of(heads)[:, None, None] * distances
    np.testing.assert_allclose(y, expected, rtol=1e-6)
    steeper = nnx.ALiBi(heads, max_bias=4.0)(jnp.array([5]), jnp.arange(9))
    expected = -np.sqrt(slopes_of(heads))[:, None, None] * distances
    np.testing.assert_allclose(steeper, expected, rtol=1e-6)


BIASES = {
    "T5": lambda: nnx.RelativePositionBias(
        4, num_buckets=8, max_distance=9, bidirectional=False, rngs=nnx.Rngs(0)
    ),
    "ALiBi": lambda: nnx.ALiBi(4),
}
each_bias = pytest.mark.parametrize("name", BIASES)


@each_bias
def test_only_distances_count_and_axes_of_one_broadcast(name):
    bias = BIASES[name]()
    queries, keys = jnp.array([[3, 4], [0, 9]]), jnp.arange(12)[None]
    y = bias(queries, keys)
    assert y.shape == (2, 4, 2, 12)
    assert y.dtype == jnp.float32
    np.testing.assert_array_equal(bias(queries + 70, keys + 70), y)
    np.testing.assert_array_equal(bias(queries[1], keys[0]), y[1])
    unsigned = bias(queries.astype(jnp.uint8), keys.astype(jnp.uint8))
    np.testing.assert_array_equal(unsigned, y)
    mapped = jax.vmap(bias, in_axes=(0, None))(queries, keys[0])
    np.testing.assert_array_equal(mapped, y)


@each_bias
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_cache_with_biases_gives_what_the_whole_sequence_gives(name, dtype):
    bias, x = BIASES[name](), random(2, 12, 4, 8).astype(dtype)
    positions = jnp.broadcast_to(jnp.arange(12), (2, 12))
    whole = nnx.decoding.attend(x, x, x, bias=bias(positions, positions))
    cache = nnx.decoding.KeyValueCache(2, 16, kv_heads=4, head_dim=8, dtype=dtype)
    slots = jnp.arange(16)[None]

    @nnx.jit
    def step(bias, cache, token, at):
        biases = bias(at, slots)
        return nnx.decoding.attend(token, token, token, at, cache, bias=biases)

    parts = [
        step(bias, cache, x[:, start:stop], positions[:, start:stop])
        for start, stop in [(0, 7), *((t, t + 1) for t in range(7, 12))]
    ]
    assert whole.dtype == dtype
    cached = jnp.concatenate(parts, 1).astype(jnp.float32)
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(
        cached, whole.astype(jnp.float32), rtol=tolerance, atol=tolerance
    )


@each_bias
def test_documents_that_are_packed_have_the_biases_of_each(name):
    bias, x = BIASES[name](), random(1, 9, 4, 8)
    positions = jnp.array([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    segments = jnp.array([[0] * 4 + [1] * 5])
    mask = nnx.make_attention_mask(segments, segments, jnp.equal)
    y = nnx.decoding.attend(x, x, x, mask=mask, bias=bias(positions, positions))
    for part in (slice(0, 4), slice(4, 9)):
        at = positions[:, part]
        alone = nnx.decoding.attend(*[x[:, part]] * 3, bias=bias(at, at))
        np.testing.assert_allclose(y[:, part], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_gradients_reach_the_table_of_a_bias_that_layers_share(mode):
    bias, x = BIASES["T5"](), random(1, 6, 4, 8)
    at = jnp.arange(6)[None]

    def loss(bias, layers):
        shared, y = bias(at, at), x
        for _ in range(layers):
            y = nnx.decoding.attend(y, y, y, bias=shared)
        return (y**2).sum()

    for layers in (1, 2):
        grads = nnx.jit(nnx.grad(functools.partial(loss, layers=layers), **mode))(bias)
        table = grads.embed.embedding[...]

        def of_table(table, layers=layers):
            return loss(functools.partial(_looked_up, table), layers)

        reference = jax.grad(of_table)(bias.embed.embedding[...])
        np.testing.assert_allclose(table, reference, rtol=1e-4, atol=1e-6)
        assert jnp.abs(table).max() > 0


def _looked_up(table, queries, keys):
    ahead = np.asarray(keys)[..., None, :] - np.asarray(queries)[..., None]
    numbers = np.vectorize(lambda x: bucket_of(int(x), 8, 9, False))(ahead)
    return jnp.moveaxis(table[numbers], -1, -3)


def test_the_table_has_the_name_and_dtype_of_an_embedding(tmp_path):
    class Encoder(nnx.Module):
        def __init__(self, rngs):
            self.bias = nnx.RelativePositionBias(2, param_dtype=jnp.bfloat16, rngs=rngs)

    name = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias"
    mapping = nnx.weights.Mapping({name: "bias.embed"})
    model = Encoder(nnx.Rngs(0))
    assert model.bias(jnp.arange(2), jnp.arange(2)).dtype == jnp.bfloat16
    path = tmp_path / "model.safetensors"
    nnx.weights.save(path, model, mapping)
    loaded = nnx.weights.load(path, Encoder(nnx.Rngs(1)), mapping)
    np.testing.assert_array_equal(
        loaded.bias.embed.embedding[...], model.bias.embed.embedding[...]
    )


@tables.cases(
    "options, message",
    ({"num_buckets": 7}, "7 buckets of two directions"),
    ({"num_buckets": 2}, "2 buckets of two directions"),
    ({"num_buckets": 1, "bidirectional": False}, r"1 buckets\.\n"),
    ({"max_distance": 8}, "distances up to 8 into 32 buckets"),
)
def test_buckets_must_divide_the_distances(options, message):
    with pytest.raises(ValueError, match=message):
        nnx.RelativePositionBias(2, **options, rngs=nnx.Rngs(0))


@each_bias
@tables.cases(
    "queries, keys",
    (jnp.arange(2.0), jnp.arange(2)),
    (jnp.arange(2), jnp.arange(2) > 0),
    (jnp.arange(2), jnp.arange(4)[None]),
    (jnp.array(2), jnp.array(4)),
)
def test_biases_need_integer_positions_of_equal_rank(name, queries, keys):
    with pytest.raises(ValueError, match="needs integer positions of queries and"):
        BIASES[name]()(queries, keys)


def test_alibi_needs_a_head():
    with pytest.raises(ValueError, match="ALiBi needs a head or more, got num_heads=0"):
        nnx.ALiBi(0)
