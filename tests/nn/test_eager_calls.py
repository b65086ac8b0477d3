"""Eager calls are quick, and follow JAX's settings as they are at each call.

That a function's steps are found once shows in nothing but how often it runs: its tests
import what finds them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from graftree.nn.support import eager_steps

ARGUMENTS = {
    "Linear": (8, 4),
    "LayerNorm": (8,),
    "BatchNorm": (8,),
    "MultiHeadAttention": (2, 8),
}
each_layer = pytest.mark.parametrize("name", ARGUMENTS)
x = jnp.asarray(np.arange(48, dtype=np.float32).reshape(2, 3, 8) / 48)


def make(name):
    options = {"decode": False} if name == "MultiHeadAttention" else {}
    return getattr(nnx, name)(*ARGUMENTS[name], **options, rngs=nnx.Rngs(0))


@each_layer
def test_settings_of_jax_are_those_of_each_call(name):
    layer, same = make(name), make(name)
    expected = make(name)(x)
    with jax.disable_jit():
        np.testing.assert_allclose(same(x), expected, rtol=1e-5, atol=1e-6)
    with jax.enable_x64(True):
        assert layer(np.asarray(x, np.float64)).dtype == jnp.float64
    with jax.numpy_dtype_promotion("strict"):
        with pytest.raises(ValueError, match="promotion"):
            layer(x.astype(jnp.bfloat16))
        assert layer(x).dtype == jnp.float32


@each_layer
def test_a_nan_is_found_at_the_second_call_too(name):
    layer = make(name)
    layer(x)
    infinite = jnp.full_like(x, jnp.inf)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        layer(infinite)
    assert jnp.isnan(layer(infinite)).any()


@each_layer
def test_outputs_lie_where_the_inputs_say(name):
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Explicit,))
    expected = make(name)(x)
    with jax.set_mesh(mesh):
        outputs = make(name)(jax.sharding.reshard(x, jax.P("data")))
    assert jax.typeof(outputs).sharding.spec[0] == "data"
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("extras", "is_causal", "dtype"),
    [("", False, jnp.float32), ("bias mask", True, jnp.bfloat16)],
)
def test_attention_gives_the_very_numbers_of_jax(is_causal, dtype, extras):
    shapes = (2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), (2, 4, 5, 7), (1, 1, 5, 7)
    numbers = np.random.default_rng(0)
    q, k, v, bias, mask = (jnp.asarray(numbers.normal(size=s), dtype) for s in shapes)
    options = {"bias": bias, "mask": mask > 0}
    options = {name: x for name, x in options.items() if name in extras}
    expected = jax.nn.dot_product_attention(q, k, v, **options, is_causal=is_causal)
    for _ in range(2):
        y = nnx.dot_product_attention(q, k, v, **options, is_causal=is_causal)
        np.testing.assert_array_equal(y, expected)


# ------------------------------------------------------------------------- known steps


def counted(function):
    """The function in known steps, and the list of its calls."""
    calls = []

    @eager_steps.in_known_steps
    def call(*args, **options):
        calls.append(1)
        return function(*args, **options)

    return call, calls


def test_steps_are_found_once_for_equal_types():
    double, calls = counted(lambda x, absent, *, times: x * times)
    outputs = [double(x, None, times=times) for times in (2, 2, 3, 3)]
    np.testing.assert_array_equal(outputs, np.stack([x * 2, x * 2, x * 3, x * 3]))
    assert len(calls) == 2
    jax.make_jaxpr(lambda x: double(x, None, times=2))(x)
    assert len(calls) == 3


def test_without_compilation_each_call_runs_the_function():
    double, calls = counted(lambda x: 2 * x)
    with jax.disable_jit():
        for _ in range(2):
            np.testing.assert_array_equal(double(x), 2 * x)
    assert len(calls) == 2


def test_what_has_no_steps_is_called():
    magnitude, _ = counted(lambda x: x if x.sum() > 0 else -x)
    for _ in range(2):
        np.testing.assert_array_equal(magnitude(-x), x)


def test_an_error_is_that_of_the_call():
    add, _ = counted(lambda x, y: x + y)
    for _ in range(2):
        with pytest.raises(TypeError, match="incompatible shapes"):
            add(x, jnp.ones((1, 3, 7)))


def test_a_program_that_fails_is_not_tried_again(monkeypatch):
    double, _ = counted(lambda x: 2 * x)
    double(x)
    tried = []

    def fail(*_):
        tried.append(1)
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(eager_steps.Steps, "__call__", fail)
    for _ in range(2):
        np.testing.assert_array_equal(double(x), 2 * x)
    assert len(tried) == 1
