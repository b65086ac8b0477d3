"""A Stack computes what a list of its layers computes, by a loop."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import zoo

LENGTH = 5


class Block(nnx.Module):
    """Parameters, random streams, statistics."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, scale=1.0, *, deterministic=False):
        y = self.linear(self.norm(x, use_running_average=deterministic)) * scale
        return x + self.dropout(y, deterministic=deterministic)


def pair(make=Block):
    """A list of layers, and the Stack of the same."""
    first, second = nnx.Rngs(0, dropout=1), nnx.Rngs(0, dropout=1)
    layers = [make(first) for _ in range(LENGTH)]
    stack = nnx.Stack(make, LENGTH, rngs=second)
    for name in first:
        np.testing.assert_array_equal(first[name].count[...], second[name].count[...])
    return layers, stack


def in_turn(layers, x, *args, **kwargs):
    for layer in layers:
        x = layer(x, *args, **kwargs)
    return x


def stacked(layers):
    return jax.tree.map(lambda *x: jnp.stack(x), *map(nnx.state, layers))


def assert_same_state(stack, layers):
    found, expected = nnx.state(stack.layers), stacked(layers)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(assert_close, nnx.as_pure(found), nnx.as_pure(expected))


def assert_close(a, b):
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


X = np.random.default_rng(0).normal(size=(3, 4)).astype("float32")


def test_numbers_and_state_are_those_of_a_list(mode):
    layers, stack = pair()
    assert_same_state(stack, layers)
    call = nnx.jit(lambda stack, x: stack(x), **mode)
    for _ in range(2):  # random keys and statistics of the second call are new ones
        assert_close(call(stack, X), in_turn(layers, X))
    assert_same_state(stack, layers)
    scale = jnp.arange(4.0)[None]
    expected = in_turn(layers, X, scale, deterministic=True)
    assert_close(stack(X, scale, deterministic=True), expected)


@pytest.mark.parametrize("remat", [True, jax.checkpoint_policies.dots_saveable])
def test_gradients_are_those_of_a_list_also_with_remat(remat):
    layers, stack = pair()
    stack.remat = remat
    expected = nnx.grad(lambda layers: jnp.sum(in_turn(layers, X) ** 2))(layers)
    found = nnx.grad(lambda stack: jnp.sum(stack(X) ** 2))(stack)
    for path, leaf in nnx.to_flat_state(found["layers"]):
        for i in range(LENGTH):
            each = dict(nnx.to_flat_state(expected[i]))[path]
            assert_close(leaf[...][i], each[...])


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(2, 4, decode=True, rngs=rngs)

    def __call__(self, x):
        return x + self.attention(x)


def test_caches_are_kept_per_layer():
    layers, stack = pair(Decoder)
    for layer in layers:
        layer.attention.init_cache((1, 3, 4))
    stack.each(lambda layer: layer.attention.init_cache((1, 3, 4)))
    step = nnx.jit(lambda stack, x: stack(x))
    for token in X[:, None, None]:
        assert_close(step(stack, token), in_turn(layers, token))
    assert_same_state(stack, layers)


class Pair(nnx.Module):
    """Makes Variables where it is looked at: caches, and one of its own keys."""

    def __init__(self, rngs):
        self.inner = Decoder(rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def set_view(self, noise: bool | None = None):
        if noise:
            self.noise = nnx.Variable(jax.random.normal(self.dropout.rngs(), (2,)))


def test_a_view_makes_in_each_layer_what_is_made_in_a_list():
    layers, stack = pair(Pair)
    before = nnx.graphdef(stack)
    options = {"decode": True, "batch_size": 5, "max_length": 3, "noise": True}
    viewed = [nnx.view(layer, **options, deterministic=True) for layer in layers]
    found = nnx.view(nnx.Dict(a=stack), **options, deterministic=True).a
    assert nnx.graphdef(stack) == before
    assert_same_state(found, viewed)
    kernel = stack.layers.inner.attention.query.kernel
    assert found.layers.inner.attention.query.kernel is kernel
    assert found.layers.dropout.deterministic


def test_a_view_of_stacks_in_a_stack_makes_caches_for_all():
    def make(rngs):
        return nnx.Sequential(nnx.Stack(Decoder, 3, rngs=rngs))

    options = {"decode": True, "batch_size": 1, "max_length": 3}
    stack = nnx.view(nnx.Stack(make, 2, rngs=nnx.Rngs(0)), **options)
    attention = stack.layers.layers[0].layers.attention
    assert attention.cached_key.shape == (2, 3, 1, 3, 2, 2)
    assert stack(X[:1, None]).shape == (1, 1, 4)


def test_abstract_stacks_are_viewed_if_nothing_is_made():
    stack = nnx.eval_shape(lambda: nnx.Stack(Block, 2, rngs=nnx.Rngs(0)))
    viewed = nnx.view(stack, deterministic=True, use_running_average=True)
    assert viewed.layers.dropout.deterministic
    stack = nnx.eval_shape(lambda: nnx.Stack(Decoder, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="without an entry per layer"):
        nnx.view(stack, batch_size=1, max_length=3)


def init_cache(layer):
    layer.attention.init_cache((1, 3, 4))


def add_variable(layer):
    layer.extra = nnx.Variable(jnp.ones(()))


def replace_value(layer):
    layer.attention.query.bias.set_value(jnp.ones((2, 2, 1)))


@pytest.mark.parametrize("change", [init_cache, add_variable, replace_value])
@pytest.mark.parametrize(
    "use",
    [
        lambda stack: stack(X[:1, None]),
        lambda stack: stack.scan(X[:1, None], jnp.ones(3)),
        lambda stack: stack[0],
        lambda stack: stack[:2],
        lambda stack: stack.each(lambda layer: None),
        len,
    ],
)
def test_variables_without_an_entry_per_layer_are_refused_with_the_way_out(change, use):
    stack = nnx.Stack(Decoder, 3, rngs=nnx.Rngs(0))
    change(stack.layers)
    with pytest.raises(ValueError, match=r"3 layers .*\n  layers\.[^$]*stack.each\("):
        use(stack)
    stack = nnx.Stack(Decoder, 3, rngs=nnx.Rngs(0))
    stack.each(change)
    assert len(stack) == 3


def test_program_does_not_grow_with_depth():
    def size(length):
        stack = nnx.Stack(Block, length, rngs=nnx.Rngs(0))
        step = nnx.grad(lambda stack, x: jnp.sum(stack(x)))
        return len(nnx.jit(step).lower(stack, X).as_text().splitlines())

    assert size(2) == size(9)


def test_unrolling_all_layers_differs_from_unrolling_one():
    def unrolled(unroll):
        stack = nnx.Stack(Block, LENGTH, rngs=nnx.Rngs(0), unroll=unroll)
        program = str(jax.make_jaxpr(lambda stack, x: stack(x))(stack, X))
        return re.findall(r"unroll=(\d+)", program)

    assert [unrolled(u) for u in (1, True, 2, 1)] == [["1"], ["5"], ["2"], ["1"]]


def test_values_per_layer_are_scanned_and_outputs_stacked():
    class Add(nnx.Module):
        def __call__(self, x, values, factor):
            return x + factor * values["a"], x

    stack = nnx.Stack(lambda rngs: Add(), 3, rngs=nnx.Rngs(0))
    last, outputs = stack.scan(jnp.array(0.0), {"a": jnp.array([1.0, 2.0, 3.0])}, 2)
    assert (last, *outputs) == (12.0, 0.0, 2.0, 6.0)


def test_layers_are_read_and_replaced_by_index():
    layers, stack = pair()
    np.testing.assert_array_equal(stack[-1].linear.kernel, layers[-1].linear.kernel)
    assert len([*stack]) == LENGTH
    with pytest.raises(nnx.errors.ImmutableVariableError):
        stack[0].linear.kernel[...] = 0.0
    stack[1] = layers[3]
    np.testing.assert_array_equal(stack[1].linear.kernel, layers[3].linear.kernel)
    np.testing.assert_array_equal(stack[2].linear.kernel, layers[2].linear.kernel)
    with pytest.raises(IndexError, match="5 layers has no layer 5"):
        stack[5]
    before = nnx.state(stack)
    with pytest.raises(ValueError, match="a Linear in the layer"):
        stack[0] = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    assert nnx.state(stack) == before


def test_layers_with_the_streams_of_all_are_refused():
    message = r"rngs/default/count: RngCount\n.*rngs.fork\(\)"
    with pytest.raises(ValueError, match=message):
        nnx.Stack(zoo.Noise, 2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="length=0"):
        nnx.Stack(Block, 0, rngs=nnx.Rngs(0))


def test_annotations_and_places_know_the_axis_of_layers():
    def make(rngs):
        metadata = {"out_sharding": (None, "model")}
        return nnx.Linear(4, 4, kernel_metadata=metadata, rngs=rngs)

    kinds = (jax.sharding.AxisType.Auto,) * 2
    with jax.set_mesh(jax.make_mesh((2, 4), ("layers", "model"), axis_types=kinds)):
        for name, length in (("layers", 1), (None, 2)):
            stack = nnx.Stack(make, 2, rngs=nnx.Rngs(0), axis_name=name)
            kernel = stack.layers.kernel
            assert kernel.out_sharding == (name, None, "model")
            assert kernel[...].sharding.shard_shape((2, 4, 4)) == (length, 4, 1)
            assert stack[0].kernel.out_sharding == (None, "model")
            assert stack(jnp.ones((1, 4))).shape == (1, 4)
