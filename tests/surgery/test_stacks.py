"""A Stack computes what a list of its layers computes, by a loop; Sequential."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import graftree as nnx
from tests import meshes, tables, zoo
from tests.comparisons import unchanged


def linear(rngs, **options):
    return nnx.Linear(4, 4, rngs=rngs, **options)


class Block(nnx.Module):
    """Parameters, random streams, statistics."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, scale=1.0, *, deterministic=False):
        y = self.linear(self.norm(x, use_running_average=deterministic)) * scale
        return x + self.dropout(y, deterministic=deterministic)


def pair(make=Block, length=3, **options):
    """A list of layers, and the Stack of the same."""
    first, second = nnx.Rngs(0, dropout=1), nnx.Rngs(0, dropout=1)
    layers = [make(first) for _ in range(length)]
    stack = nnx.Stack(make, length, rngs=second, **options)
    for name in first:
        np.testing.assert_array_equal(first[name].count[...], second[name].count[...])
    return layers, stack


@nnx.jit(static_argnames="deterministic")
def in_turn(layers, x, *args, **options):
    for layer in layers:
        x = layer(x, *args, **options)
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
    gradient = nnx.grad(lambda layers: jnp.sum(in_turn(layers, X) ** 2))
    expected = nnx.jit(gradient)(layers)
    found = nnx.grad(lambda stack: jnp.sum(stack(X) ** 2))(stack)
    for path, leaf in nnx.to_flat_state(found["layers"]):
        for i in range(3):
            assert_close(leaf[...][i], dict(nnx.to_flat_state(expected[i]))[path][...])


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(2, 4, decode=True, rngs=rngs)

    def __call__(self, x):
        return x + self.attention(x)


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


def test_abstract_stacks_have_abstract_layers_and_views_if_nothing_is_made():
    stack = nnx.eval_shape(lambda: nnx.Stack(Block, 2, rngs=nnx.Rngs(0)))
    assert stack[1].linear.kernel.shape == (4, 4)
    assert stack[1:].layers.linear.kernel.shape == (1, 4, 4)
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
@tables.cases(
    "use",
    lambda stack: stack(X[:1, None]),
    lambda stack: stack.scan(X[:1, None], jnp.ones(3)),
    lambda stack: stack[0],
    lambda stack: stack[:2],
    lambda stack: stack.each(lambda layer: None),
    len,
)
def test_variables_without_an_entry_per_layer_are_refused_with_the_way_out(change, use):
    stack = nnx.Stack(Decoder, 3, rngs=nnx.Rngs(0))
    change(stack.layers)
    with pytest.raises(ValueError, match=r"3 layers .*\n  layers\.[^$]*stack.each\("):
        use(stack)
    stack = nnx.Stack(Decoder, 3, rngs=nnx.Rngs(0))
    stack.each(change)
    assert len(stack) == 3


def test_unrolling_all_layers_differs_from_unrolling_one():
    def unrolled(unroll):
        stack = nnx.Stack(Block, 5, rngs=nnx.Rngs(0), unroll=unroll)
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


def test_layers_are_read_and_replaced_by_index_and_a_slice_is_a_stack():
    layers, stack = pair(length=4)
    assert len([*stack]) == 4
    fixed = {"deterministic": True}
    assert_close(stack[1:3](X, **fixed), in_turn(layers[1:3], X, **fixed))
    assert (len(stack[::2]), stack[::2].length) == (2, 2)
    for part in (stack[0], stack[1:].layers):
        with pytest.raises(nnx.errors.ImmutableVariableError):
            part.linear.kernel[...] = 0.0
    stack[0] = stack[3]
    stack[1] = layers[2]
    assert_same_state(stack, [layers[i] for i in (3, 2, 2, 3)])
    np.testing.assert_array_equal(stack[-1].linear.kernel, layers[-1].linear.kernel)
    with pytest.raises(IndexError, match="4 layers has no layer 4"):
        stack[4]
    with unchanged(stack), pytest.raises(ValueError, match="a Linear in the layer"):
        stack[0] = linear(nnx.Rngs(0))


def test_a_layer_keeps_what_it_shares_within_itself():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(2, 2, rngs=rngs)
            self.kernel = self.linear.kernel

    stack = nnx.Stack(Tied, 3, rngs=nnx.Rngs(0))
    for layer in (stack[1], stack[1:].layers):
        assert layer.kernel is layer.linear.kernel
    assert stack[1].kernel.shape == (2, 2)


def test_layers_with_the_streams_of_all_are_refused():
    message = r"rngs/default/count: RngCount\n.*rngs.fork\(\)"
    with pytest.raises(ValueError, match=message):
        nnx.Stack(zoo.Noise, 2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="length=0"):
        nnx.Stack(Block, 0, rngs=nnx.Rngs(0))


def test_annotations_and_places_know_the_axis_of_layers():
    with jax.set_mesh(meshes.mesh_of(layers=2, model=4)):
        for name, length in (("layers", 1), (None, 2)):
            stack = nnx.Stack(annotated, 2, rngs=nnx.Rngs(0), axis_name=name)
            kernel = stack.layers.kernel
            assert kernel.out_sharding == (name, None, "model")
            assert kernel[...].sharding.shard_shape((2, 4, 4)) == (length, 4, 1)
            assert stack[0].kernel.out_sharding == (None, "model")
            assert stack(jnp.ones((1, 4))).shape == (1, 4)


# ------------------------------------------------------------- as programs use them


class WithRngs(nnx.Module):
    """Draws from the streams that it is called with."""

    def __init__(self, rngs):
        self.linear = linear(rngs)
        self.dropout = nnx.Dropout(0.5)

    def __call__(self, x, rngs):
        return x + self.dropout(self.linear(x), rngs=rngs)


def test_objects_among_the_arguments_are_written_by_each_layer_in_turn(in_mode):
    layers, stack = pair(WithRngs)
    expected, found = nnx.Rngs(1), nnx.Rngs(1)
    assert_close(stack(X, rngs=found), in_turn(layers, X, rngs=expected))
    assert found.default.count[...] == expected.default.count[...] == 3


def test_caches_are_made_and_kept_per_layer(in_mode):
    layers, stack = pair(Decoder)
    for layer in layers:
        init_cache(layer)
    expected = [in_turn(layers, token) for token in X[:, None, None]]
    stack.each(init_cache)
    step = nnx.jit(lambda stack, x: stack(x))
    found = [step(stack, token) for token in X[:, None, None]]
    assert_close(np.stack(found), np.stack(expected))
    assert_same_state(stack, layers)


@pytest.mark.parametrize(("given", "made"), [("float32", "bfloat16"), ("int32", None)])
def test_x_becomes_what_all_layers_return(given, made):
    layers, stack = pair(lambda rngs: linear(rngs, dtype=made))
    x = jnp.asarray(X).astype(given)
    found, expected = stack(x), in_turn(layers, x)
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=0.05, atol=0.05)


class Turns(nnx.Module):
    """Returns what the function makes of x."""

    def __init__(self, f):
        self.f = f

    def __call__(self, x):
        return self.f(x)


@tables.cases(
    "f, words",
    (lambda x: x[..., :2], r"float32\[3,4\] in, float32\[3,2\] out"),
    (lambda x: x.astype(int), r"float32\[3,4\] in, int32\[3,4\] out"),
    (lambda x: x.astype("f2" if x.dtype == "f4" else "f4"), "float16"),
    (lambda x: (x, x), r"stack.scan\(x, values\)"),
)
def test_layers_that_change_x_are_refused_in_words(f, words):
    stack = nnx.Stack(lambda rngs: Turns(f), 2, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=words):
        stack(jnp.asarray(X))


def test_layers_may_have_an_object_without_variables_from_outside():
    rope = nnx.RoPE()

    def make(rngs):
        return nnx.MultiHeadAttention(2, 4, rope=rope, decode=False, rngs=rngs)

    layers, stack = pair(make)
    assert_same_state(stack, layers)
    assert_close(nnx.jit(lambda stack, x: stack(x))(stack, X), in_turn(layers, X))
    assert stack.layers.rope is not rope
    tables = nnx.RoPE(embedding_size=2, max_seq_len=3)
    with pytest.raises(ValueError, match=r"cached_cos: Variable\nMake it in"):
        nnx.Stack(lambda rngs: nnx.Sequential(tables), 2, rngs=nnx.Rngs(0))


def test_misuse_is_refused_in_words():
    shared = linear(nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"did not make.*\n.*bias.*\n.*stack\(x, sh"):
        nnx.Stack(lambda rngs: nnx.Sequential(shared), 2, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"make\(rngs\) is of type int"):
        nnx.Stack(lambda rngs: 3, 2, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"expects an nnx.Rngs"):
        nnx.Stack(linear, 2, rngs=jax.random.key(0))
    with pytest.raises(TypeError, match="integer"):
        nnx.Stack(linear, 2.5, rngs=nnx.Rngs(0))
    stack = nnx.Stack(linear, 2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"2 layers.\n  values\['a'\]: shape \(3,\)"):
        stack.scan(X, {"a": jnp.ones(3)})
    with pytest.raises(IndexError, match="no layers in slice"):
        stack[2:]


def test_layers_without_arrays_are_counted():
    stack = nnx.Stack(lambda rngs: Turns(lambda x: x + 1), 3, rngs=nnx.Rngs(0))
    assert_close(stack(X), X + 3)
    assert stack.each(lambda layer: jnp.ones(2)).shape == (3, 2)


def test_training_changes_layers_as_it_does_in_a_list():
    layers, stack = pair()
    models = nnx.List(layers), stack

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            is_stack = isinstance(model, nnx.Stack)
            return jnp.sum((model(X) if is_stack else in_turn(model, X)) ** 2)

        optimizer.update(model, nnx.grad(loss)(model))

    for model in models:
        optimizer = nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param)
        average = nnx.EMA(model, 0.5)
        for _ in range(2):
            step(model, optimizer)
        average.update(model)
    assert_same_state(stack, layers)


def test_program_of_16_layers_is_as_long_as_that_of_4():
    def lines(length):
        stack = nnx.Stack(Block, length, rngs=nnx.Rngs(0), remat=True)
        step = nnx.jit(nnx.grad(lambda stack, x: jnp.sum(stack(x))))
        return len(step.lower(stack, X).as_text().splitlines())

    assert lines(4) == lines(16)


# ---------------------------------------------------------------------------- on a mesh


def annotated(rngs):
    return linear(rngs, kernel_metadata={"out_sharding": (None, "model")})


def test_the_axis_of_layers_divides_also_what_is_not_annotated():
    mesh = meshes.mesh_of(stage=4, model=2)

    def make():
        return nnx.Stack(annotated, 4, rngs=nnx.Rngs(0), axis_name="stage")

    stack = nnx.sharding.init(make, mesh)
    report = {row.path: row.local_shape for row in nnx.sharding.report(stack).rows}
    assert report == {"layers.bias": (1, 4), "layers.kernel": (1, 4, 2)}
    stack.each(lambda layer: setattr(layer, "cache", nnx.Cache(jnp.zeros(2))))
    with jax.set_mesh(mesh):
        nnx.jit(lambda stack: stack(jnp.ones((1, 4))))(stack)
    assert stack.layers.bias.out_sharding == ("stage",)
    assert stack.layers.cache.out_sharding == ("stage",)
    assert "out_sharding" not in stack[0].bias.get_metadata()
    with pytest.raises(ValueError, match="stage"):
        nnx.sharding.init(make, meshes.mesh_of(stage=8, model=1))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_layers_are_stacked_and_unstacked_where_they_are(kind):
    mesh = meshes.mesh_of(kind, stage=2, model=4)

    def make():
        rngs = nnx.Rngs(0)
        return nnx.Dict(layers=nnx.List([annotated(rngs) for _ in range(4)]))

    model, expected = nnx.sharding.init(make, mesh), nnx.sharding.init(make, mesh)
    with jax.set_mesh(mesh):
        nnx.surgery.stack(model, "layers", axis_name="stage")
        assert model.layers.layers.kernel.out_sharding == ("stage", None, "model")
        kernel = model.layers.layers.kernel[...]
        count = (
            2 if kind == "Auto" else 4
        )  # JAX loops over undivided Explicit axes only
        assert kernel.sharding.shard_shape(kernel.shape) == (count, 4, 1)
        model.layers[0] = model.layers[1]
        nnx.surgery.unstack(model)
        expected.layers[0] = nnx.clone(expected.layers[1])
        assert nnx.graphdef(model) == nnx.graphdef(expected)
        states = [nnx.as_pure(nnx.state(x)) for x in (model, expected)]
        jax.tree.map(assert_close, *states)


def test_a_loop_over_a_divided_explicit_axis_is_refused_in_words():
    mesh = meshes.mesh_of("Explicit", stage=2)

    def make():
        return nnx.Stack(linear, 2, rngs=nnx.Rngs(0), axis_name="stage")

    stack = nnx.sharding.init(make, mesh)
    with jax.set_mesh(mesh):
        stack[0] = stack[1]
        with pytest.raises(ValueError, match=r"'stage'.*\n.*shard_map"):
            stack(jnp.ones((1, 4)))


def test_abstract_models_keep_their_shardings():
    mesh = meshes.mesh_of(stage=2, model=4)

    def make():
        return nnx.Dict(layers=nnx.List([annotated(nnx.Rngs(0)) for _ in range(2)]))

    model = nnx.merge(*nnx.get_abstract_model(make, mesh))
    nnx.surgery.stack(model, "layers", axis_name="stage")
    kernel = model.layers.layers.kernel.get_value()
    assert kernel.sharding.spec == jax.P("stage", None, "model")
    nnx.surgery.unstack(model)
    assert model.layers[1].kernel.get_value().sharding.spec == jax.P(None, "model")


def test_devices_apply_the_layers_that_they_have():
    mesh = meshes.mesh_of(stage=4)
    layers, stack = pair(linear, 8, axis_name="stage")

    specs = {"in_specs": (jax.P("stage"), jax.P()), "out_specs": jax.P("stage")}

    @nnx.shard_map(mesh=mesh, **specs)
    def apply(stack, x):
        assert len(stack) == 2 and stack[1].kernel.shape == (4, 4)
        return stack(x)[None]

    expected = [in_turn(layers[i : i + 2], X) for i in range(0, 8, 2)]
    assert_close(apply(stack, X), jnp.stack(expected))


def test_x_goes_where_layers_of_an_explicit_mesh_put_it():
    with jax.set_mesh(meshes.mesh_of("Explicit", model=4)):
        y = nnx.Stack(annotated, 2, rngs=nnx.Rngs(0))(jnp.ones((1, 4)))
        assert jax.typeof(y).sharding.spec == jax.P(None, "model")


# --------------------------------------------------------------------------- Sequential


# What else it does is in tests/contract/test_variables/test_modules.py.


def test_a_list_is_one_argument_and_tuples_are_many():
    model = nnx.Sequential(lambda x: (x, 2), lambda a, b: [a, b], list)
    assert model(1) == [1, 2]


def test_without_layers_keywords_beside_arguments_are_dropped():
    assert nnx.Sequential()(1, a=2) == 1


def test_parameters_filled_by_position_are_not_filled_again():
    model = nnx.Sequential(lambda x: (x, x), lambda x, y, z=0: (x, y, z))
    assert model(1, y=5, z=6) == (1, 1, 6)


def test_list_of_layers_is_not_unpacked():
    with pytest.raises(TypeError, match=r"Sequence\[0\] is not callable"):
        nnx.Sequential([jnp.sin])(1.0)
    with pytest.raises(ValueError, match=r"(?s)Sequential\(\*layers\).*Found data"):
        nnx.Sequential([zoo.Scale()])


def test_has_keyword_arg_knows_the_kinds_of_parameters():
    def f(a, /, b, *c, d, **e):
        pass

    found = [name for name in "abcdez" if nnx.helpers.has_keyword_arg(f, name)]
    assert found == ["b", "d"]
