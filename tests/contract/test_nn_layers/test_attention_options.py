"""Scales, sliding windows, soft caps, sinks and lengths of keys, against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import test_util

import graftree as nnx
from tests import programs, tables
from tests.contract.test_nn_layers import test_attention
from tests.contract.test_nn_layers.test_attention import (
    PATHS,
    SINKS,
    Silent,
    attention,
    exact_weights,
    qkv,
)
from tests.random_arrays import random, random_mask

LENGTHS = np.array([[5, 3, 0], [1, 4, 2]])
EVERYTHING = {
    "scale": 0.7,
    "is_causal": True,
    "sliding_window": 2,
    "logits_soft_cap": 0.5,
    "sinks": SINKS,
    "key_value_seq_lengths": LENGTHS,
    "mask": random_mask(2, 3, 4, 3, 5),
    "bias": random(2, 3, 4, 3, 5, seed=8),
}
OPTIONS = [
    {"scale": 0.3},
    *({"is_causal": True, "sliding_window": n} for n in (1, 2, 3, 9)),
    {"logits_soft_cap": 0.5, "bias": random(4, 1, 1, seed=8)},
    {"sinks": SINKS, "mask": random_mask(3, 1, 3, 5)},
    {"key_value_seq_lengths": LENGTHS},
    {"is_causal": True, "sliding_window": 2, "key_value_seq_lengths": LENGTHS},
    EVERYTHING,
]


@PATHS
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options))
def test_each_option_is_its_formula(path, options, float64):
    arrays = [np.float64(x) for x in qkv((2, 3), kv_heads=2)]
    y = programs.in_one_program(nnx.dot_product_attention, *arrays, **options, **path)
    expected = attention(*arrays, **options)
    assert y.dtype == jnp.float64
    np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-12)


def test_without_batch_axes_there_is_one_length():
    arrays = qkv(())
    y = nnx.dot_product_attention(*arrays, key_value_seq_lengths=np.uint8(2))
    expected = attention(*arrays, key_value_seq_lengths=2)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_what_jax_takes_is_the_program_of_jax():
    arrays, lengths = qkv(kv_heads=2), jnp.array([5, 3])
    same = {"is_causal": True, "scale": 0.3}
    ours = functools.partial(nnx.dot_product_attention, **same, sliding_window=2)
    window = {"local_window_size": (1, 0)}
    jaxs = functools.partial(jax.nn.dot_product_attention, **same, **window)

    def program(attend):
        def call(*arrays, lengths):
            return attend(*arrays, key_value_seq_lengths=lengths)

        return jax.jit(call).lower(*arrays, lengths=lengths).as_text()

    assert program(ours) == program(jaxs)


def test_an_additive_mask_holds_beyond_a_cap():
    arrays = qkv()
    bias = np.where(np.arange(5) < 2, 0.0, -1e30)
    y = nnx.dot_product_attention(*arrays, bias=bias, logits_soft_cap=1.0)
    expected = attention(*arrays, mask=bias == 0, logits_soft_cap=1.0)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_gradients_are_those_of_finite_differences(float64):
    arrays = [np.float64(x) for x in qkv((), heads=2, kv_heads=1, depth=2)]

    @jax.jit
    def loss(query, key, value, scale, cap, sinks):
        options = {"scale": scale, "logits_soft_cap": cap, "sinks": sinks}
        options |= {"is_causal": True, "sliding_window": 2}
        return jnp.sum(jnp.sin(nnx.dot_product_attention(query, key, value, **options)))

    more = (np.float64(0.7), np.float64(0.9), np.array([0.3, -0.5]))
    test_util.check_grads(loss, (*arrays, *more), order=1, modes=["fwd", "rev"])


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_rounds_only_the_result(dtype):
    query, key, _ = (x.astype(dtype) for x in qkv())
    # A scale that half precision does not have.
    options = {"scale": 1 / 12, "logits_soft_cap": 30.0, "sinks": SINKS.astype(dtype)}
    found = programs.in_one_program(test_attention.weights_of, query, key, **options)
    assert found.dtype == dtype
    expected = exact_weights(*(np.asarray(x, float) for x in (query, key)), **options)
    rtol = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(found, float), expected, rtol, 1e-7)


@PATHS
@tables.cases(
    "options, message",
    ({"sliding_window": 2}, r"needs is_causal=True.*\n.*KeyValueCache"),
    ({"sliding_window": 0, "is_causal": True}, "positive integer, got 0"),
    ({"sliding_window": 2.5, "is_causal": True}, "positive integer, got 2.5"),
    ({"logits_soft_cap": 0.0}, "must be positive, or None, got 0.0"),
    ({"sinks": np.ones(2)}, r"each of 4 query heads, \[4\].*shape \[2\]"),
    ({"key_value_seq_lengths": [3]}, r"batch axes, \[2\], but got int\d+\[1\]"),
    ({"key_value_seq_lengths": np.ones(2)}, r"integers.*got float\d+\[2\]"),
)
def test_what_an_option_can_not_be(path, options, message):
    with pytest.raises(ValueError, match=message):
        nnx.dot_product_attention(*qkv(), **options, **path)


# Options of attention, and those of the closed form in float64.
ALIKE = [
    ({}, {}),
    ({"is_causal": True}, {"is_causal": True}),
    ({"bias": random(2, 1, 3, 5)}, {"bias": random(2, 1, 3, 5)}),
    ({"logits_soft_cap": 2.0, "scale": 0.3}, {"logits_soft_cap": 2.0, "scale": 0.3}),
    ({"precision": "highest"}, {}),
    ({"module": Silent()}, {}),
]


def complex_attention(query, key, value, **options):
    """Attention whose logits are real parts: those of twice as many features."""
    scale = options.pop("scale", query.shape[-1] ** -0.5)
    query = np.concatenate([query.real, -query.imag], axis=-1)
    key = np.concatenate([key.real, key.imag], axis=-1)
    real, imaginary = (
        attention(query, key, part, **options, scale=scale)
        for part in (value.real, value.imag)
    )
    return real + 1j * imaginary


@tables.cases("options, exact", *ALIKE)
def test_complex_numbers_meet_by_their_real_parts(options, exact):
    arrays = [
        np.complex64(random(*shape, seed=i) + 1j * random(*shape, seed=9 + i))
        for i, shape in enumerate([(2, 3, 4, 8), (2, 5, 2, 8), (2, 5, 2, 8)])
    ]
    y = nnx.dot_product_attention(*arrays, **options)
    assert y.dtype == jnp.complex64
    np.testing.assert_allclose(y, complex_attention(*arrays, **exact), 1e-5, 1e-5)
