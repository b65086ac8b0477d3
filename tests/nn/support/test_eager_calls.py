"""Eager calls are quick, and follow JAX's settings as they are at each call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from graftree.nn.support import eager_steps


def rngs():
    return nnx.Rngs(0)


LAYERS = {
    "Linear": lambda: nnx.Linear(8, 4, rngs=rngs()),
    "LayerNorm": lambda: nnx.LayerNorm(8, rngs=rngs()),
    "BatchNorm": lambda: nnx.BatchNorm(8, rngs=rngs()),
    "MultiHeadAttention": lambda: nnx.MultiHeadAttention(
        2, 8, decode=False, rngs=rngs()
    ),
}
each_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
x = jnp.arange(48.0).reshape(2, 3, 8) / 48


@each_layer
def test_a_nan_is_found_at_the_second_call_too(make):
    layer = make()
    layer(x)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        layer(jnp.full_like(x, jnp.inf))
    assert jnp.isnan(layer(jnp.full_like(x, jnp.inf))).any()


@each_layer
def test_without_compilation_the_numbers_are_the_same(make):
    expected = make()(x)
    with jax.disable_jit():
        outputs = make()(x)
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)


@each_layer
def test_dtypes_follow_the_setting_of_each_call(make):
    layer = make()
    layer(x)
    with jax.enable_x64(True):
        wide = layer(np.asarray(x, np.float64))
    with jax.numpy_dtype_promotion("strict"):
        with pytest.raises(ValueError, match="promotion"):
            layer(x.astype(jnp.bfloat16))
        narrow = layer(x)
    assert (wide.dtype, narrow.dtype) == (jnp.float64, jnp.float32)


@each_layer
def test_outputs_lie_where_the_inputs_say(make):
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Explicit,))
    layer = make()
    expected = layer(x)
    with jax.set_mesh(mesh):
        layer = make()
        outputs = layer(jax.sharding.reshard(x, jax.P("data")))
    assert jax.typeof(outputs).sharding.spec[0] == "data"
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("extras", "is_causal", "dtype"),
    [("", False, jnp.float32), ("bias mask", True, jnp.bfloat16)],
)
def test_attention_gives_the_very_numbers_of_jax(is_causal, dtype, extras):
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = (2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), (2, 4, 5, 7), (1, 1, 5, 7)
    draw = jax.random.normal
    q, k, v, bias, mask = map(draw, keys, shapes, [dtype] * 5)
    options = {"bias": bias, "mask": mask > 0}
    options = {name: x for name, x in options.items() if name in extras}
    expected = jax.nn.dot_product_attention(q, k, v, **options, is_causal=is_causal)
    for _ in range(2):
        y = nnx.dot_product_attention(q, k, v, **options, is_causal=is_causal)
        np.testing.assert_array_equal(y, expected)


def test_steps_are_found_once_for_equal_types():
    calls = []

    @eager_steps.in_known_steps
    def double(x, absent, *, times):
        calls.append(1)
        return x * times

    outputs = [double(x, None, times=times) for times in (2, 2, 3, 3)]
    np.testing.assert_array_equal(outputs, np.stack([x * 2, x * 2, x * 3, x * 3]))
    assert len(calls) == 2
    jax.make_jaxpr(lambda x: double(x, None, times=2))(x)
    assert len(calls) == 3


def test_without_compilation_each_call_runs_the_function():
    calls = []

    @eager_steps.in_known_steps
    def double(x):
        calls.append(1)
        return 2 * x

    with jax.disable_jit():
        for _ in range(2):
            np.testing.assert_array_equal(double(x), 2 * x)
    assert len(calls) == 2


def test_what_has_no_steps_is_called():
    @eager_steps.in_known_steps
    def magnitude(x):
        return x if x.sum() > 0 else -x

    for _ in range(2):
        np.testing.assert_array_equal(magnitude(-x), x)


def test_an_error_is_that_of_the_call():
    @eager_steps.in_known_steps
    def add(x, y):
        return x + y

    for _ in range(2):
        with pytest.raises(TypeError, match="incompatible shapes"):
            add(x, jnp.ones((1, 3, 7)))


def test_a_program_that_fails_is_not_tried_again(monkeypatch):
    @eager_steps.in_known_steps
    def double(x):
        return 2 * x

    double(x)
    tried = []

    def fail(*_):
        tried.append(1)
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(eager_steps.Steps, "__call__", fail)
    for _ in range(2):
        np.testing.assert_array_equal(double(x), 2 * x)
    assert len(tried) == 1
