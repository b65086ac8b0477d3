"""Which keys layers draw, and the numbers that come of them (contract, section 14)."""

import operator
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx


def linear(*sizes, **options):
    return nnx.Linear(*sizes, **options, rngs=nnx.Rngs(0))


def key(*counts, seed=0):
    """The key after these draws, each from the stream that the last one began."""
    result = jax.random.key(seed)
    for count in counts:
        result = jax.random.fold_in(result, count)
    return result


# Per layer its constructor (given ``rngs``), and how many keys it draws with a bias.
DRAWS = {
    "Linear": (lambda r: nnx.Linear(2, 3, rngs=r), 2),
    "LinearGeneral": (lambda r: nnx.LinearGeneral(2, 3, rngs=r), 2),
    "Einsum": (lambda r: nnx.Einsum("ab,bc->ac", (2, 3), 3, rngs=r), 2),
    "Conv": (lambda r: nnx.Conv(2, 3, 3, rngs=r), 2),
    "ConvTranspose": (lambda r: nnx.ConvTranspose(2, 3, 3, rngs=r), 2),
    "Embed": (lambda r: nnx.Embed(2, 3, rngs=r), 1),
    "LoRA": (lambda r: nnx.LoRA(2, 1, 3, rngs=r), 2),
    "LoRALinear": (lambda r: nnx.LoRALinear(2, 3, lora_rank=1, rngs=r), 4),
    "BatchNorm": (lambda r: nnx.BatchNorm(2, rngs=r), 2),
    "LayerNorm": (lambda r: nnx.LayerNorm(2, rngs=r), 2),
    "GroupNorm": (lambda r: nnx.GroupNorm(2, 1, rngs=r), 2),
    "InstanceNorm": (lambda r: nnx.InstanceNorm(2, rngs=r), 2),
    "RMSNorm": (lambda r: nnx.RMSNorm(2, rngs=r), 1),
    "SpectralNorm": (lambda r: nnx.SpectralNorm(linear(2, 3), rngs=r), 1),
    "WeightNorm": (lambda r: nnx.WeightNorm(linear(2, 3), rngs=r), 0),
    "LSTMCell": (lambda r: nnx.LSTMCell(2, 3, rngs=r), 12),
    "OptimizedLSTMCell": (lambda r: nnx.OptimizedLSTMCell(2, 3, rngs=r), 3),
    "SimpleCell": (lambda r: nnx.SimpleCell(2, 3, rngs=r), 3),
    "GRUCell": (lambda r: nnx.GRUCell(2, 3, rngs=r), 3),
    "MultiHeadAttention": (lambda r: nnx.MultiHeadAttention(2, 4, rngs=r), 8),
    "norms": (lambda r: nnx.MultiHeadAttention(2, 4, normalize_qk=True, rngs=r), 10),
    "without bias": (lambda r: nnx.Linear(2, 3, use_bias=False, rngs=r), 1),
    "none": (lambda r: nnx.LayerNorm(2, use_bias=False, use_scale=False, rngs=r), 0),
}


@pytest.mark.parametrize("name", DRAWS)
def test_layers_draw_their_number_of_keys_from_params(name):
    make, count = DRAWS[name]
    rngs = nnx.Rngs(0, params=1, dropout=2, carry=3)
    make(rngs)
    counts = {k: int(rngs[k].count[...]) for k in ("params", "dropout", "carry")}
    assert counts == {"params": count, "dropout": 0, "carry": 0}
    assert rngs.default.count[...] == 0


def attention(rngs):
    return nnx.MultiHeadAttention(2, 4, dropout_rate=0.5, rngs=rngs)


def rnn(seed, rngs=True):
    return nnx.RNN(nnx.GRUCell(2, 3, rngs=nnx.Rngs(seed)), rngs=rngs)


# Layers that keep a stream: the name of the one they fork, and how they are made.
FORKS = {
    "Dropout": ("noise", lambda r: nnx.Dropout(0.5, rng_collection="noise", rngs=r)),
    "Attention": ("dropout", attention),
    "RNN": ("carry", lambda r: rnn(0, r)),
    "Bidirectional": ("carry", lambda r: nnx.Bidirectional(rnn(0), rnn(1), rngs=r)),
}


@pytest.mark.parametrize("name", FORKS)
def test_layers_that_draw_later_keep_a_fork_and_its_tag(name):
    stream, make = FORKS[name]
    rngs = nnx.Rngs(**{"params": 1, stream: 7})
    layer = make(rngs)
    assert rngs[stream].count[...] == 1
    assert layer.rngs.key[...] == key(0, seed=7)
    assert (layer.rngs.count[...], layer.rngs.tag) == (0, stream)
    rngs = nnx.Rngs(params=1, default=7)
    assert make(rngs).rngs.tag == "default"
    assert rngs.default.count[...] == 1


def test_cells_fork_before_they_draw_their_params():
    rngs = nnx.Rngs(0)
    with pytest.warns(UserWarning, match="keep_rngs argument is deprecated"):
        cell = nnx.GRUCell(2, 3, keep_rngs=True, rngs=rngs)
    assert cell.rngs.key[...] == key(0)
    assert rngs.default.count[...] == 4


def test_attention_forks_after_its_params():
    assert attention(nnx.Rngs(0)).rngs.key[...] == key(8)


def test_the_nth_key_is_folded_from_the_key_and_the_count():
    kernel = nnx.initializers.lecun_normal()(key(0), (2, 3), jnp.float32)
    np.testing.assert_array_equal(linear(2, 3).kernel[...], kernel)
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    for n in range(3):
        kept = jax.random.bernoulli(key(0, n), 0.5, (16,))
        np.testing.assert_array_equal(dropout(jnp.ones(16)), 2.0 * kept)


# ------------------------------------------------------------- published numbers


def general(*sizes, **options):
    return nnx.LinearGeneral(*sizes, axis=(-2, -1), **options)


def lora(*sizes, **options):
    return nnx.LoRALinear(*sizes, lora_rank=2, **options)


def spectral(rngs):
    norm = nnx.SpectralNorm(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), rngs=rngs)
    return types.SimpleNamespace(u=norm.batch_stats["kernel", "u"])


# A layer, its sizes, the path of a Param in it, the sum of that and its first entries.
NUMBERS = [
    (nnx.Linear, (2, 3), "kernel", -1.5841567)
    + (0.7567299, -0.6857005, -0.5688337, -0.8757605),
    (general, ((2, 3), (4, 5)), "kernel", 5.3294494)
    + (0.4368983, -0.3958894, -0.3284163, -0.5056206),
    (nnx.Conv, (3, 4, 3), "kernel", 1.0697719)
    + (0.3567259, -0.3232424, -0.2681508, -0.4128375),
    (nnx.Embed, (5, 3), "embedding", -1.7087169)
    + (0.5796679, -0.5232740, -0.4319574, -0.6762890),
    (nnx.MultiHeadAttention, (2, 4), "query.kernel", -1.2985813, 0.5350889),
    (nnx.MultiHeadAttention, (2, 4), "key.kernel", 0.9493977, 0.6797945),
    (nnx.MultiHeadAttention, (2, 4), "value.kernel", -1.3851357, -0.5436897),
    (nnx.MultiHeadAttention, (2, 4), "out.kernel", 2.9667004, 0.6153617),
    (nnx.LSTMCell, (2, 3), "ii.kernel", -1.5841567, 0.7567299),
    (nnx.LSTMCell, (2, 3), "if_.kernel", -4.4712596, -1.5153329),
    (nnx.LSTMCell, (2, 3), "hi.kernel", -1.3580108, -0.7837888),
    (nnx.LSTMCell, (2, 3), "ho.kernel", -2.3456446, -0.1426982),
    (nnx.OptimizedLSTMCell, (2, 3), "dense_i.kernel", -0.5423267, 0.7567299),
    (nnx.OptimizedLSTMCell, (2, 3), "dense_h.kernel", -2.7342030, -0.5433681),
    (nnx.GRUCell, (2, 3), "dense_i.kernel", -1.7439917, 0.7567299),
    (nnx.GRUCell, (2, 3), "dense_h.kernel", 1.3665038, 0.4244834),
    (nnx.SimpleCell, (2, 3), "dense_i.kernel", -4.4712596, -1.5153329),
    (nnx.SimpleCell, (2, 3), "dense_h.kernel", -1.4714753, 0.5891491),
    (lora, (3, 4), "lora.lora_a", 1.5041376)
    + (1.1382990, 1.1661402, -0.4495851, -0.7917019),
    (spectral, (), "u", -0.0065050, 0.0100401, -0.0090634, -0.0074817),
]


@pytest.mark.parametrize("row", NUMBERS, ids=lambda row: f"{row[0].__name__}.{row[2]}")
def test_seed_zero_gives_the_published_numbers(row):
    make, sizes, path, total, *first = row
    param = operator.attrgetter(path)(make(*sizes, rngs=nnx.Rngs(0)))
    values = np.float64(param[...]).ravel()
    # They are published with seven digits; a QR differs in the last bit by how it is
    # compiled.
    np.testing.assert_allclose(values[: len(first)], first, rtol=0, atol=1.5e-7)
    np.testing.assert_allclose(values.sum(), total, rtol=0, atol=1e-6)


def test_seed_zero_drops_the_published_entries():
    layer = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    for expected in ([2, 0, 2, 0, 2, 2, 2, 0], [2, 2, 2, 0, 2, 0, 0, 2]):
        np.testing.assert_array_equal(layer(jnp.ones(8)), expected)
