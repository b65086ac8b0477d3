"""Params get the very values that their initializers give, however often they are made.

The library may find quicker ways to the same bits: each value is made several times.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx

INITIALIZERS = {
    "default": None,
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
DEFAULT = nnx.initializers.lecun_normal()


def kernel(initializer, shape, dtype=jnp.float32, rngs=None):
    """The kernel of a layer; no initializer: the default one."""
    options = {} if initializer is None else {"kernel_init": initializer}
    rngs = nnx.Rngs(0) if rngs is None else rngs
    return nnx.Einsum(None, shape, param_dtype=dtype, **options, rngs=rngs).kernel[...]


def check(initializer, shape, dtype=jnp.float32):
    for seed in range(4):
        key = jax.random.fold_in(jax.random.key(seed), 0)
        ours = kernel(initializer, shape, dtype, nnx.Rngs(seed))
        theirs = (initializer or DEFAULT)(key, shape, dtype)
        for fact in ("aval", "sharding", "committed"):
            assert getattr(ours, fact) == getattr(theirs, fact)
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


@pytest.mark.parametrize("name", INITIALIZERS)
def test_values_are_those_of_the_initializer(name):
    check(INITIALIZERS[name], (2, 3, 4))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, "float32"])
@pytest.mark.parametrize("name", ["ones", "default", "he_normal"])
def test_values_have_the_dtype_that_was_asked_for(name, dtype):
    check(INITIALIZERS[name], (3, 5), dtype)


def test_whole_numbers_are_left_to_the_initializer():
    check(INITIALIZERS["ones"], (3, 5), jnp.int8)


@pytest.mark.parametrize("name", ["zeros", "default"])
@pytest.mark.parametrize(("first", "second"), [(14.0, 14), (15, 15.0)])
def test_what_is_known_of_a_size_does_not_hold_for_an_equal_float(name, first, second):
    for size in [first] * 3 + [second] * 3:
        if isinstance(size, int):
            kernel(INITIALIZERS[name], (size, 3))
        else:
            with pytest.raises(TypeError):
                kernel(INITIALIZERS[name], (size, 3))


@pytest.mark.parametrize("shape", [(3,), (0, 3)])
def test_shapes_without_a_scale_are_left_to_the_initializer(shape):
    for _ in range(3):
        try:
            theirs = DEFAULT(jax.random.key(0), shape, jnp.float32).shape
        except (ValueError, ZeroDivisionError) as error:
            with pytest.raises(type(error)):
                kernel(None, shape)
        else:
            assert kernel(None, shape).shape == theirs


def test_traced_values_are_those_of_the_initializer():
    shape = (2, 3)
    check(None, shape)
    keys = jax.random.split(jax.random.key(0), 2)
    ours = jax.vmap(lambda key: kernel(None, shape, rngs=nnx.Rngs(params=key)))(keys)
    folded = jax.vmap(jax.random.fold_in, (0, None))(keys, 0)
    theirs = jax.vmap(lambda key: DEFAULT(key, shape, jnp.float32))(folded)
    np.testing.assert_array_equal(ours, theirs)
    assert nnx.eval_shape(lambda: kernel(None, shape)).dtype == jnp.float32


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
    check(None, (4, 4))
    check(nnx.initializers.zeros, (4, 4))
    drawn = []

    def truncated_normal(*args, **kwargs):
        drawn.append(args)
        return jnp.ones(args[3], args[4])

    random = DEFAULT.__globals__["random"]
    monkeypatch.setattr(random, "truncated_normal", truncated_normal)
    check(None, (4, 4))
    assert len(drawn) == 8
    monkeypatch.setattr(jnp, "zeros", lambda shape, *_, **__: jnp.ones(shape))
    check(nnx.initializers.zeros, (4, 4))
