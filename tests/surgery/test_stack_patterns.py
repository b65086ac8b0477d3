"""Stacks of layers that differ by a pattern: they mean the same as a list of these."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import meshes, tables
from tests.comparisons import raises


class Block(nnx.Module):
    """Attention with a window, or none, and a base of rotary positions."""

    def __init__(self, window, base, rngs, annotation=None):
        annotations = {"out_sharding": annotation} if annotation else {}
        self.norm = nnx.RMSNorm(8, rngs=rngs)
        self.query = nnx.LinearGeneral(8, (2, 4), rngs=rngs)
        self.up = nnx.Linear(8, 8, kernel_metadata=annotations, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.rope, self.window = nnx.RoPE(base), window

    def init_cache(self, batch, length):
        return nnx.decoding.KeyValueCache(
            batch, length, kv_heads=2, head_dim=4, window=self.window
        )

    def __call__(self, x, cache, positions):
        query = self.rope.rotate_heads(self.query(self.norm(x)), positions)
        seen = nnx.decoding.attend(
            query, query, query, positions, cache, sliding_window=self.window
        )
        out = self.up(seen.reshape(x.shape))
        return x + self.dropout(out), jnp.abs(out).mean()


# Two layers with a window to each without, and another base there.
PATTERN = [(3, 1e4), (3, 1e4), (None, 1e6)]
MAKES = [functools.partial(Block, *settings) for settings in PATTERN]
X = np.random.default_rng(0).normal(size=(2, 6, 8)).astype("float32")
POSITIONS = np.broadcast_to(np.arange(6), (2, 6))


def pair(length=8, makes=MAKES, **options):
    """A list of layers, and the Stack of the same."""
    first, second = nnx.Rngs(0, dropout=1), nnx.Rngs(0, dropout=1)
    layers = nnx.List([makes[i % len(makes)](first) for i in range(length)])
    stack = nnx.Stack(makes, length, rngs=second, **options)
    return layers, stack


def in_turn(layers, x, caches=None, positions=POSITIONS):
    outputs = []
    for i, layer in enumerate(layers):
        x, output = layer(x, caches and caches[i], positions)
        outputs.append(output)
    return x, jnp.stack(outputs)


def in_a_loop(stack, x, caches=None, positions=POSITIONS):
    return stack.scan(x, caches, positions)


def assert_same(a, b):
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    np.testing.assert_array_equal(a, b)


def assert_same_layers(layers, others):
    assert len(layers) == len(others)
    for one, other in zip(layers, others, strict=True):
        assert (one.window, one.rope.theta) == (other.window, other.rope.theta)
        states = [nnx.as_pure(nnx.state(x)) for x in (one, other)]
        jax.tree.map(assert_same, *states)


@pytest.mark.parametrize("length", [1, 2, 3, 6, 8])
def test_numbers_and_state_are_those_of_a_list_bit_for_bit(length, mode):
    layers, stack = pair(length)
    assert_same_layers(stack, layers)
    call = nnx.jit(in_a_loop, **mode)
    for _ in range(2):  # random keys of the second call are new ones
        found, expected = call(stack, X), nnx.jit(in_turn, **mode)(layers, X)
        jax.tree.map(assert_same, found, expected)
    assert_same_layers(stack, layers)


def gradients(call, layers):
    gradient = nnx.grad(lambda layers: jnp.sum(call(layers, X)[0] ** 2))
    as_layers = nnx.clone(layers)
    nnx.update(as_layers, gradient(layers))
    return as_layers


@pytest.mark.long
def test_gradients_are_those_of_a_list():
    layers, stack = pair()
    # Op by op: XLA may round both programs differently.
    with jax.disable_jit():
        assert_same_layers(gradients(in_a_loop, stack), gradients(in_turn, layers))


@pytest.mark.long
@pytest.mark.parametrize(
    "remat", [True, jax.checkpoint_policies.dots_saveable, nnx.memory.save("query")]
)
def test_gradients_with_remat_are_those_without(remat):
    stack, other = pair()[1], pair(remat=remat)[1]
    found, expected = (gradients(in_a_loop, x) for x in (other, stack))
    for one, another in zip(found, expected, strict=True):
        kernels = [x.up.kernel[...] for x in (one, another)]
        np.testing.assert_allclose(*kernels, rtol=1e-4, atol=1e-3)


def test_remat_keeps_the_input_of_each_layer_only():
    def kept(remat):
        stack = nnx.eval_shape(lambda: pair(remat=remat)[1])
        return nnx.memory.saved(
            lambda stack, x: in_a_loop(stack, x)[0].sum(), stack, X
        ).bytes

    # Two of the eight layers are behind the last whole pattern.
    assert kept(True) < kept(False) / 5


@pytest.mark.long
def test_each_layer_has_a_cache_of_its_size_and_decodes_as_in_a_list():
    layers, stack = pair()
    caches = stack.each(lambda layer: layer.init_cache(2, 6))
    others = [layer.init_cache(2, 6) for layer in layers]
    assert [x.key.shape[:3] for x in caches.pattern] == [
        (2, 2, 3),
        (2, 2, 3),
        (2, 2, 6),
    ]
    assert [x.key.shape[:2] for x in caches.rest] == [(2, 3), (2, 3)]
    whole, _ = in_turn(nnx.view(layers, deterministic=True), X)
    for part in (slice(0, 3), slice(3, 4), slice(4, 6)):
        x, at = X[:, part], POSITIONS[:, part]
        expected, _ = nnx.jit(in_turn)(layers, x, others, at)
        found, outputs = nnx.jit(in_a_loop)(stack, x, caches, at)
        assert_same(found, expected)
    assert_same(caches.rest[1].key[...], others[7].key[...])
    assert_same(caches.pattern[2].key[1], others[5].key[...])
    assert [x.shape for x in (*outputs.pattern, *outputs.rest)] == [(2,)] * 3 + [()] * 2
    assert whole.shape == X.shape


class Generator(nnx.Module):
    def __init__(self, layers, rngs):
        self.embed, self.layers = nnx.Embed(20, 8, rngs=rngs), layers

    def init_cache(self, batch, length):
        if isinstance(self.layers, nnx.Stack):
            return self.layers.each(lambda layer: layer.init_cache(batch, length))
        return [layer.init_cache(batch, length) for layer in self.layers]

    def __call__(self, tokens, *, positions, cache):
        run = in_a_loop if isinstance(self.layers, nnx.Stack) else in_turn
        return self.embed.attend(
            run(self.layers, self.embed(tokens), cache, positions)[0]
        )


@pytest.mark.long
def test_generated_tokens_are_those_of_a_list():
    models = [
        nnx.view(Generator(layers, nnx.Rngs(5)), deterministic=True)
        for layers in pair()
    ]
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    found, expected = (
        nnx.decoding.generate(model, prompts, max_new_tokens=10).lists()
        for model in models
    )
    assert found == expected


def test_values_by_layer_go_to_their_layers_and_outputs_come_in_order():
    class Scale(nnx.Module):
        def __init__(self, sign):
            self.sign = sign

        def __call__(self, x, factor):
            x = x * factor * self.sign
            return x, {"x": x, "sign": jnp.full(2, self.sign)}

    makes = [lambda rngs: Scale(1.0), lambda rngs: Scale(-1.0)]
    stack = nnx.Stack(makes, 5, rngs=nnx.Rngs(0))
    x, outputs = stack.scan(jnp.ones(()), jnp.arange(1.0, 6.0))
    assert x == 120 and outputs["x"].tolist() == [1, -2, -6, 24, 120]
    assert outputs["sign"].tolist() == [[1, 1], [-1, -1]] * 2 + [[1, 1]]


def test_layers_are_read_replaced_and_sliced_by_number():
    layers, stack = pair()
    for index in (
        slice(1, 7),
        slice(None, None, 2),
        slice(6, None),
        slice(None, 1, -3),
    ):
        part = stack[index]
        assert isinstance(part, nnx.Stack)
        assert_same_layers(part, layers[index])
    for position in (5, 7):
        new = MAKES[position % 3](nnx.Rngs(7, dropout=8))
        stack[position] = layers[position] = new
        assert_same_layers(stack, layers)
    with pytest.raises(nnx.errors.StateMismatchError, match="window"):
        stack[5] = layers[4]
    assert_same_layers(stack, layers)


@pytest.mark.long
def test_views_reach_all_layers():
    layers, stack = pair()
    stack = nnx.view(stack, deterministic=True)
    assert [layer.dropout.deterministic for layer in stack] == [True] * 8
    layers = nnx.view(layers, deterministic=True)
    found, expected = nnx.jit(in_a_loop)(stack, X), nnx.jit(in_turn)(layers, X)
    jax.tree.map(assert_same, found, expected)


class Decoder(nnx.Module):
    def __init__(self, heads, rngs):
        self.attention = nnx.MultiHeadAttention(heads, 4, decode=True, rngs=rngs)


def test_views_make_what_they_make_in_each_layer_of_a_list():
    makes = [functools.partial(Decoder, heads) for heads in (1, 2)]
    stack = nnx.view(pair(3, makes)[1], decode=True, batch_size=2, max_length=5)
    shapes = [stack[i].attention.cached_key.shape for i in range(3)]
    assert shapes == [(2, 5, 1, 4), (2, 5, 2, 2), (2, 5, 1, 4)]


# ---------------------------------------------------------- a list into a Stack, back


@pytest.mark.parametrize("abstract", [False, True])
def test_a_list_becomes_a_stack_and_back(abstract):
    make = lambda: nnx.Dict(blocks=pair()[0])  # noqa: E731
    model, other = (nnx.eval_shape(make) if abstract else make() for _ in range(2))
    assert nnx.surgery.stack(model, "blocks", period=3) == [("blocks",)]
    assert nnx.graphdef(model.blocks) == nnx.graphdef(pair()[1])
    nnx.surgery.unstack(model)
    assert nnx.graphdef(model) == nnx.graphdef(other)
    if not abstract:
        assert_same_layers(model.blocks, other.blocks)


@tables.cases("period", None, 2)
def test_lists_of_another_pattern_are_refused_with_the_way_out(period):
    model = nnx.Dict(blocks=pair()[0])
    with pytest.raises(nnx.errors.StateMismatchError, match=r"(?s)window.*period="):
        nnx.surgery.stack(model, "blocks", period=period)
    assert isinstance(model.blocks, nnx.List)
    with raises(ValueError, "period=0 must be positive"):
        nnx.surgery.stack(model, "blocks", period=0)


# -------------------------------------------------------------------------- on a mesh


@pytest.mark.long
def test_the_axis_of_layers_is_that_of_whole_patterns():
    mesh = meshes.mesh_of(stage=2, model=4)
    makes = [functools.partial(x, annotation=(None, "model")) for x in MAKES]

    def make():
        return nnx.Stack(makes, 8, rngs=nnx.Rngs(0, dropout=1), axis_name="stage")

    stack = nnx.sharding.init(make, mesh)
    shapes = {row.path: row.local_shape for row in nnx.sharding.report(stack).rows}
    assert shapes["layers[2].up.kernel"] == (1, 8, 2)
    assert shapes["rest[1].up.kernel"] == (8, 2)
    assert stack[2].up.kernel.out_sharding == (None, "model")
    with jax.set_mesh(mesh):
        found = nnx.jit(in_a_loop)(stack, X)[0]
    expected = nnx.jit(in_turn)(pair()[0], X)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("length", [6, 8])
def test_devices_apply_the_whole_patterns_they_have_or_it_is_an_error(length):
    layers, stack = pair(length, axis_name="stage")
    layers, stack = (nnx.view(x, deterministic=True) for x in (layers, stack))
    parts = {nnx.PathContains("layers"): jax.P("stage"), ...: jax.P()}
    specs = {
        "in_specs": (nnx.StateSharding(parts), jax.P()),
        "out_specs": jax.P("stage"),
    }

    @nnx.shard_map(mesh=meshes.mesh_of(stage=2), **specs)
    def apply(stack, x):
        return in_a_loop(stack, x)[0][None]

    if length == 8:
        with raises(ValueError, "can't be divided by layers", "apply them after it"):
            apply(stack, X)
        return
    expected = [in_turn(layers[i : i + 3], X)[0] for i in (0, 3)]
    np.testing.assert_allclose(apply(stack, X), expected, rtol=1e-4, atol=1e-3)


# --------------------------------------------------------------------------- refusals


def one_cache_for_all(stack):
    cache = nnx.vmap(lambda _: MAKES[0](nnx.Rngs(0)).init_cache(2, 6))(jnp.arange(8))
    stack.scan(X, cache, POSITIONS)


def values_of_another_pattern(stack):
    other = nnx.Stack(MAKES[:2], 8, rngs=nnx.Rngs(0))
    stack.scan(X, other.each(lambda layer: layer.init_cache(2, 6)), POSITIONS)


def values_of_another_length(stack):
    other = nnx.Stack(MAKES, 11, rngs=nnx.Rngs(0))
    stack.scan(X, other.each(lambda layer: layer.init_cache(2, 6)), POSITIONS)


def outputs_that_differ(stack):
    class Outputs(nnx.Module):
        def __init__(self, count):
            self.count = count

        def __call__(self, x, value):
            return x, jnp.zeros(self.count)

    makes = [lambda rngs, i=i: Outputs(i) for i in (1, 2)]
    nnx.Stack(makes, 4, rngs=nnx.Rngs(0)).scan(X, None)


@tables.cases(
    "misuse, error, words",
    (one_cache_for_all, TypeError, "share one KeyValueCache.*\n.*each"),
    (values_of_another_pattern, ValueError, "different pattern.*\n.*each"),
    (values_of_another_length, ValueError, r"2 layers(?s:.)*pattern\[0\].*key"),
    (outputs_that_differ, TypeError, "different shapes(?s:.)*each"),
    (lambda _: nnx.Stack([], 3, rngs=nnx.Rngs(0)), ValueError, r"got \[\]"),
    (
        lambda _: nnx.Stack([lambda rngs: 1], 3, rngs=nnx.Rngs(0)),
        TypeError,
        "made of Modules.*int",
    ),
    (lambda stack: stack[8], IndexError, "8 layers has no layer 8"),
)
def test_misuse_is_refused_in_words(misuse, error, words):
    with pytest.raises(error, match=words):
        misuse(pair()[1])
