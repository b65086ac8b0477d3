"""Params get the very values that their initializers give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from graftree.nn.support import first_values

INITIALIZERS = {
    "default": first_values.lecun_normal,
    "zeros": nnx.initializers.zeros,
    "ones": nnx.initializers.ones,
    "lecun_normal": nnx.initializers.lecun_normal(),
    "he_normal": nnx.initializers.he_normal(),
    "glorot_normal": nnx.initializers.glorot_normal(in_axis=1, out_axis=0),
    "lecun_uniform": nnx.initializers.lecun_uniform(),
    "variance_scaling": nnx.initializers.variance_scaling(3.0, "fan_in", "normal"),
    "batched": nnx.initializers.lecun_normal(batch_axis=(0,)),
    "axes": nnx.initializers.lecun_normal(in_axis=[0, 1]),
    "normal": nnx.initializers.normal(0.1),
    "orthogonal": nnx.initializers.orthogonal(),
}


@pytest.fixture(autouse=True)
def _nothing_known():
    first_values._known.cache_clear()


def check(initializer, shape, dtype):
    for seed in range(4):
        key = jax.random.key(seed)
        ours = first_values.make(initializer, key, shape, dtype)
        theirs = initializer(key, shape, dtype)
        assert (ours.aval, ours.sharding, ours.committed) == (
            theirs.aval,
            theirs.sharding,
            theirs.committed,
        )
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


@pytest.mark.parametrize("name", INITIALIZERS)
def test_values_are_those_of_the_initializer(name):
    check(INITIALIZERS[name], (2, 3, 4), jnp.float32)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, "float32"])
@pytest.mark.parametrize("name", ["ones", "default", "he_normal"])
def test_values_have_the_dtype_that_was_asked_for(name, dtype):
    check(INITIALIZERS[name], (3, 5), dtype)


def test_whole_numbers_are_left_to_the_initializer():
    check(INITIALIZERS["ones"], (3, 5), jnp.int8)


@pytest.mark.parametrize("name", ["zeros", "default"])
def test_what_is_known_of_a_size_does_not_hold_for_an_equal_float(name):
    initializer, key = INITIALIZERS[name], jax.random.key(0)
    for first, second in [(4.0, 4), (5, 5.0)]:
        for size in [first] * 3 + [second] * 3:
            if isinstance(size, int):
                first_values.make(initializer, key, (size, 3), jnp.float32)
            else:
                with pytest.raises(TypeError):
                    first_values.make(initializer, key, (size, 3), jnp.float32)


def test_values_are_those_of_another_scale_if_jax_has_one(monkeypatch):
    monkeypatch.setattr(first_values, "_DEVIATION", 0.9)
    check(INITIALIZERS["default"], (8, 8), jnp.float32)


@pytest.mark.parametrize("shape", [(3,), (0, 3)])
def test_shapes_without_a_scale_are_left_to_the_initializer(shape):
    initializer = INITIALIZERS["default"]
    for _ in range(3):
        try:
            theirs = initializer(jax.random.key(0), shape, jnp.float32).shape
        except (ValueError, ZeroDivisionError) as error:
            with pytest.raises(type(error)):
                first_values.make(initializer, jax.random.key(0), shape, jnp.float32)
        else:
            ours = first_values.make(initializer, jax.random.key(0), shape, jnp.float32)
            assert ours.shape == theirs


def test_traced_calls_are_those_of_the_initializer():
    initializer = INITIALIZERS["default"]
    check(initializer, (2, 3), jnp.float32)

    def make(key):
        return first_values.make(initializer, key, (2, 3), jnp.float32)

    keys = jax.random.split(jax.random.key(0), 2)
    expected = jax.vmap(lambda key: initializer(key, (2, 3), jnp.float32))(keys)
    np.testing.assert_array_equal(jax.vmap(make)(keys), expected)
    shape = jax.eval_shape(make, keys[0])
    assert shape.dtype == jnp.float32


def test_layers_share_no_array():
    layers = [nnx.Linear(3, 3, rngs=nnx.Rngs(0)) for _ in range(4)]
    assert len({id(layer.bias[...]) for layer in layers}) == 4

    @nnx.jit(donate_argnums=0)
    def grow(layers):
        for layer in layers:
            layer.bias[...] += 1

    grow(layers)
    np.testing.assert_array_equal(layers[3].bias[...], np.ones(3))


def test_patched_functions_are_called(monkeypatch):
    initializer = INITIALIZERS["default"]
    check(initializer, (4, 4), jnp.float32)
    check(nnx.initializers.zeros, (4, 4), jnp.float32)
    drawn = []

    def truncated_normal(*args, **kwargs):
        drawn.append(args)
        return jnp.ones(args[3], args[4])

    random = initializer.__globals__["random"]
    monkeypatch.setattr(random, "truncated_normal", truncated_normal)
    check(initializer, (4, 4), jnp.float32)
    assert len(drawn) == 8
    monkeypatch.setattr(jnp, "zeros", lambda shape, *_, **__: jnp.ones(shape))
    check(nnx.initializers.zeros, (4, 4), jnp.float32)
