"""Layers do in every transform what they do when called; their derivatives are right.

These are laws of families: `make test` runs them for one layer of each, `make test-all`
for all.
"""

import functools
import pickle
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import graftree as nnx
from tests import catalog, modes

COUNT = 2  # layers, each with keys and inputs of its own


# ----------------------------------------------------------------------- the transforms
#
# Each function calls the layers in its transform, and gives the outputs.


def one_by_one(transform):
    """Calls the transformed function once per layer."""

    def run(call, layers, inputs, mode):
        traces = []

        def traced(*args):
            traces.append(1)
            return call(*args)

        transformed = transform(traced, **mode)
        outputs = [transformed(m, *x) for m, x in zip(layers, inputs, strict=True)]
        count = len(traces)
        transformed(nnx.clone(layers[0]), *inputs[0])
        assert len(traces) == count  # a second call of a layer is not traced again
        return outputs

    return run


def stacked(transform):
    """Calls the transformed function once, on a stack of the layers."""

    def run(call, layers, inputs, mode):
        stack = stack_layers(layers)
        outputs = transform(call, len(inputs[0]), **mode)(stack, *stack_arrays(inputs))
        for i, layer in enumerate(layers):
            nnx.update(layer, entry(nnx.state(stack), i))
        return [entry(outputs, i) for i in range(COUNT)]

    return run


def stack_layers(layers):
    graphdef = nnx.graphdef(layers[0])
    return nnx.merge(graphdef, stack_arrays([nnx.state(m) for m in layers]))


# By NumPy, which compiles nothing.


def stack_arrays(trees):
    return jax.tree.map(lambda *arrays: by_numpy(np.stack, *arrays), *trees)


def entry(tree, i):
    return jax.tree.map(lambda array: by_numpy(lambda x: x[0][i], array), tree)


def by_numpy(function, *arrays):
    found = jnp.asarray(function([catalog.raw(x) for x in arrays]))
    is_key = jnp.issubdtype(arrays[0].dtype, jax.dtypes.prng_key)
    return jax.random.wrap_key_data(found) if is_key else found


def jitted_gradient(call, **mode):
    """The outputs of a program that differentiates the layer, too."""

    def loss(layer, *x):
        outputs = nnx.remat(call, **mode)(layer, *x)
        return total(outputs), outputs

    gradient = nnx.grad(loss, has_aux=True, allow_int=True, **mode)
    return nnx.jit(lambda *args: gradient(*args)[1], **mode)


def total(outputs):
    leaves = jax.tree.leaves(outputs)
    return sum(jnp.sum(jnp.sin(y.astype(jnp.float32))) for y in leaves)


def vmapped(call, count, **mode):
    return nnx.vmap(call, **mode)


def scanned(call, count, **mode):
    def step(steps, layer, *x):
        return steps + 1, call(layer, *x)

    axes = (nnx.Carry, 0)
    scan = nnx.scan(step, in_axes=axes + (0,) * count, out_axes=axes, **mode)
    return lambda *args: scan(0, *args)[1]


def plain_jit(call):
    """Plain ``jax.jit``, where the layer is returned to be seen."""

    @jax.jit
    def function(layer, *x):
        return call(layer, *x), layer

    def run(layer, *x):
        outputs, after = function(layer, *x)
        nnx.update(layer, nnx.state(after))
        return outputs

    return run


def jit_with_refs(call):
    """Plain ``jax.jit`` of a layer of refs, which it updates in place."""

    def run(layer, *x):
        refs = nnx.to_refs(layer)
        outputs = jax.jit(call)(refs, *x)
        nnx.update(layer, nnx.state(nnx.to_arrays(refs)))
        return outputs

    return run


def scan_with_refs(call, count):
    """Plain ``jax.lax.scan`` over a stack of refs."""

    def run(layers, *x):
        refs = nnx.to_refs(layers)
        _, outputs = jax.lax.scan(lambda _, xs: (None, call(*xs)), None, (refs, *x))
        nnx.update(layers, nnx.state(nnx.to_arrays(refs)))
        return outputs

    return run


LIFTED = {
    "jit": one_by_one(nnx.jit),
    "jit(grad(remat))": one_by_one(jitted_gradient),
    "vmap": stacked(vmapped),
    "scan": stacked(scanned),
}
PLAIN = {
    "jax.jit": one_by_one(plain_jit),
    "jax.jit, refs": one_by_one(jit_with_refs),
    "jax.lax.scan, refs": stacked(scan_with_refs),
}
# What a mode lets through is no matter of the layer: all three are tried with one that
# only reads, one that writes its statistics, one that draws and one that scans. The
# others are in jit anyway, in a program that differentiates them too.
IN_ALL_MODES = "Linear", "BatchNorm", "Dropout", "RNN"


def case(row, name, run, mode=""):
    is_in_all = row.name in IN_ALL_MODES
    is_usual = row.is_usual if mode and name != "jit" else is_in_all
    marks = () if is_usual else pytest.mark.long
    id = "-".join([row.name, name, mode]).rstrip("-")
    return pytest.param(row, run, modes.BY_NAME.get(mode, {}), id=id, marks=marks)


CASES = [
    case(row, name, run, mode)
    for row in catalog.LAYERS
    for name, run in LIFTED.items()
    for mode in (modes.BY_NAME if row.name in IN_ALL_MODES else ["graph_updates"])
]
CASES += [case(row, *plain) for row in catalog.LAYERS for plain in PLAIN.items()]


# --------------------------------------------------------------------------- the tests


def layers_and_inputs(row):
    layers = [row.make(seed=seed) for seed in range(COUNT)]
    return layers, [row.inputs(seed) for seed in range(COUNT)]


def check_close(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


@functools.cache
def expected(name):
    """The outputs of the layers of a row, and their states afterwards."""
    row = catalog.BY_NAME[name]
    layers, inputs = layers_and_inputs(row)
    outputs = [row(m, *x) for m, x in zip(layers, inputs, strict=True)]
    return outputs, [*map(catalog.state_of, layers)]


@pytest.mark.parametrize(("row", "run", "mode"), CASES)
def test_layers_do_in_a_transform_what_they_do_without(row, run, mode):
    layers, inputs = layers_and_inputs(row)
    found = run(row, layers, inputs, mode), [*map(catalog.state_of, layers)]
    check_close(found, expected(row.name))


@catalog.every_family
def test_layers_take_and_give_half_precision(row):
    options = {"dtype": jnp.bfloat16} if row.has_dtype else {}
    layer, inputs = row.make(**options), row.inputs(dtype=jnp.bfloat16)
    outputs = nnx.jit(row)(layer, *inputs)
    expected = row(row.make(), *row.inputs())
    for half, full in zip(*map(jax.tree.leaves, (outputs, expected)), strict=True):
        assert half.dtype == jnp.bfloat16 or not row.has_dtype
        np.testing.assert_allclose(half.astype(float), full, rtol=0.05, atol=0.05)


def random_params(layer):
    """Gives the Params other values, in float64; they by name, as NumPy arrays."""
    values = {}
    for n, (path, param) in enumerate(nnx.to_flat_state(nnx.state(layer, nnx.Param))):
        value = values["_".join(map(str, path))] = random(*param.shape, seed=n)
        param.set_value(jnp.asarray(value))
    return types.SimpleNamespace(**values)


@pytest.mark.parametrize(
    "row", [x for x in catalog.LAYERS if x.formula], ids=lambda row: row.name
)
def test_layers_are_their_formulas(row, float64):
    layer, inputs = row.make(), row.inputs(dtype=jnp.float64)
    params = random_params(layer)
    expected = row.formula(params, *map(np.asarray, inputs))
    np.testing.assert_allclose(nnx.jit(row)(layer, *inputs), expected, rtol=1e-12)


# ----------------------------------------------- exports (issue 12, defect 13)


def symbolic(inputs):
    """The shapes of the inputs, with a name for the first axis, the same in all."""
    scope = export.SymbolicScope()

    def spec(x):
        shape = export.symbolic_shape("b, ...", like=x.shape, scope=scope)
        return jax.ShapeDtypeStruct(shape, x.dtype)

    return jax.tree.map(spec, inputs)


@catalog.every_family
def test_layers_export_with_a_symbolic_batch(row):
    leaves, treedef = jax.tree.flatten(nnx.split(row.make()))
    inputs = row.inputs()

    def call(leaves, *inputs):
        return row(nnx.merge(*treedef.unflatten(leaves)), *inputs)

    exported = export.export(jax.jit(call))(leaves, *symbolic(inputs))
    expected = row(row.make(), *inputs)
    check_close(exported.call(leaves, *inputs), expected)


def test_stack_exports_with_a_symbolic_batch_and_length():
    def block(rngs):
        attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
        return nnx.Sequential(nnx.LayerNorm(4, rngs=rngs), attention)

    stack = nnx.Stack(block, 2, rngs=nnx.Rngs(0))
    shape = export.symbolic_shape("b, t, 4")
    exported = export.export(jax.jit(stack))(jax.ShapeDtypeStruct(shape, np.float32))
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    np.testing.assert_allclose(exported.call(x), stack(x), rtol=1e-5, atol=1e-6)


# -------------------------------------------------------------------------- derivatives


STEP = 1e-5
BY_NAME = catalog.BY_NAME
# SpectralNorm, which leaves out how its power iteration depends on the weights, is in
# test_reparametrization.py.
ROWS = [row for row in catalog.LAYERS if row.name != "SpectralNorm"]
VARIANTS = [
    ("AvgPool", {"strides": 2, "padding": "SAME"}),
    ("Conv", {"padding": "CIRCULAR", "strides": 2, "kernel_dilation": 2}),
    ("Conv", {"padding": "REFLECT", "input_dilation": 2}),
    ("Conv", {"padding": "CAUSAL", "feature_group_count": 1}),
    ("Conv", {"padding": [(1, 2)], "mask": np.arange(36).reshape(3, 3, 4) % 2}),
    ("ConvTranspose", {"padding": "CIRCULAR"}),
    ("ConvTranspose", {"padding": "VALID", "transpose_kernel": True}),
    ("BatchNorm", {"use_running_average": True}),
    ("BatchNorm", {"use_fast_variance": False}),
    ("LayerNorm", {"use_fast_variance": False, "reduction_axes": (0, 1)}),
    ("GroupNorm", {"reduction_axes": (0, 2)}),
    ("Dropout", {"broadcast_dims": (0,)}),
]
DERIVED = [
    *(
        pytest.param(x, {}, id=x.name, marks=catalog.unless_family(x))
        for x in ROWS
        if x.has_rngs or x.bound is None  # of integers alone there is no derivative
    ),
    *(pytest.param(BY_NAME[name], x, id=f"{name}-{x}") for name, x in VARIANTS),
]


def random(*shape, seed=0):
    # NumPy's numbers: those of JAX take a program per shape, and most of the time.
    return np.random.default_rng(seed).normal(size=shape)


def fill(tree, seed):
    """Arrays for shapes: any numbers, one key for all streams, counts of zero."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten([array(x, seed + n) for n, x in enumerate(leaves)])


def array(abstract, seed):
    if jnp.issubdtype(abstract.dtype, jax.dtypes.prng_key):
        return jax.random.key(0)
    if jnp.issubdtype(abstract.dtype, jnp.floating):
        return jnp.asarray(random(*abstract.shape, seed=seed))
    numbers = np.arange(np.prod(abstract.shape, dtype=int)) % 2
    return jnp.asarray(numbers.reshape(abstract.shape), abstract.dtype)


def function_of_steps(call, arrays):
    """The output of a call as a function of how far each array is moved."""
    directions = [random(*x.shape, seed=100 + i) for i, x in enumerate(arrays)]

    def function(steps):
        moved = [x + s * v for x, s, v in zip(arrays, steps, directions, strict=True)]
        return sum(jnp.sin(y).sum() for y in jax.tree.leaves(call(moved)))

    return function


def check(call, arrays):
    function = function_of_steps(call, arrays)

    @jax.jit
    def derivatives_and_differences():
        steps = STEP * jnp.eye(len(arrays))
        values = jax.lax.map(function, jnp.concatenate([steps, -steps]))
        ahead, behind = jnp.split(values, 2)
        return jax.grad(function)(0 * steps[0]), (ahead - behind) / (2 * STEP)

    derivatives, differences = map(np.asarray, derivatives_and_differences())
    assert derivatives.dtype == differences.dtype == float and len(arrays) > 0
    assert np.isfinite(derivatives).all() and (derivatives != 0).all()
    np.testing.assert_allclose(derivatives, differences, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("row", "options"), DERIVED)
def test_gradient_equals_central_differences(float64, row, options):
    if row.name == "Embed" or row.family == "cells":
        options = options | {"dtype": float}  # their own is that of a Param, or single
    layer = nnx.eval_shape(lambda: row.make(**options))
    graphdef, params, rest = nnx.split(layer, nnx.Param, ...)
    params, treedef = jax.tree.flatten(fill(params, seed=0))
    rest = fill(rest, seed=50)
    if "var" in rest:
        rest["var"].set_value(jnp.abs(rest["var"][...]))
    inputs = jax.eval_shape(lambda: row.inputs(dtype=float))
    inputs, inputs_treedef = jax.tree.flatten(fill(inputs, seed=60))
    is_differentiable = jnp.issubdtype(inputs[0].dtype, jnp.floating)

    def call(arrays):
        given = arrays[len(params) :] if is_differentiable else inputs
        layer = nnx.merge(graphdef, treedef.unflatten(arrays[: len(params)]), rest)
        layer = nnx.clone(layer)  # its own statistics and counts, which it may write
        return row(layer, *inputs_treedef.unflatten(given))

    check(call, params + inputs * is_differentiable)


def test_gradient_of_attend_equals_central_differences(float64):
    layer = BY_NAME["Embed"].make(dtype=float)

    def call(arrays):
        model = nnx.clone(layer)
        model.embedding.set_value(arrays[0])
        return model.attend(arrays[1])

    check(call, [random(6, 3), random(2, 3)])


@pytest.mark.parametrize("fast", [True, False])
def test_gradient_of_masked_norms_equals_central_differences(float64, fast):
    options = {"use_fast_variance": fast, "rngs": nnx.Rngs(0)}
    mask = jnp.array([True, True, False, True, True])[:, None]
    norms = (
        nnx.BatchNorm(4, **options),
        nnx.LayerNorm(4, reduction_axes=(1, 2), **options),
        nnx.GroupNorm(4, 2, **options),
        nnx.InstanceNorm(4, **options),
    )

    def call(arrays):
        return [nnx.clone(norm)(arrays[0], mask=mask) for norm in norms]

    check(call, [random(2, 5, 4)])


# --------------------------------------------------------------------------- all layers


def check_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@catalog.every_layer
def test_rngs_of_the_constructor_are_not_kept(row):
    rngs = nnx.Rngs(0)
    layer = row.make(rngs=rngs) if row.has_rngs else row.make()
    assert all(node is not rngs for _, node in nnx.iter_graph(layer))


LISTS = [
    row
    for row in catalog.LAYERS
    if len(row.shapes) == 1 and row.name not in ("SpectralNorm", "WeightNorm", "Stack")
]


@catalog.of_families(LISTS)
def test_what_jax_makes_an_array_of_is_an_input(row):
    (x,) = row.inputs()
    expected = row(row.make(), x)
    for given in (np.asarray(x), np.asarray(x).tolist(), nnx.Param(x)):
        check_same(row(row.make(), given), expected)


@catalog.every_layer
def test_layers_that_differ_in_initializers_have_equal_graphdefs(row):
    kept = "negative_slope_init", "carry_init"  # are no initializers, or attributes
    kept += ("scale_init",) * (row.name == "WeightNorm")
    names = {key for key in row.parameters() if key.endswith("_init")} - {*kept}
    options = dict.fromkeys(names, nnx.initializers.ones)
    layers = [nnx.eval_shape(lambda o=o: row.make(**o)) for o in ({}, options)]
    assert nnx.graphdef(layers[0]) == nnx.graphdef(layers[1])


@catalog.every_family
def test_abstract_layers_become_callable_by_writing_arrays(row):
    abstract = jax.eval_shape(row.make)
    concrete = row.make()
    for (path, variable), (_, value) in zip(
        nnx.to_flat_state(nnx.state(abstract)),
        nnx.to_flat_state(nnx.state(concrete)),
        strict=True,
    ):
        assert variable.shape == value.shape, path
        variable.set_value(value[...])
    x = row.inputs()
    check_same(row(abstract, *x), row(concrete, *x))


@catalog.every_family
def test_construction_works_inside_jit_and_vmap(row):
    expected = jax.tree.leaves(nnx.state(row.make(), nnx.Param))
    jitted = jax.tree.leaves(nnx.state(nnx.jit(row.make)(), nnx.Param))
    for a, b in zip(expected, jitted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    if row.has_rngs:
        keys = jax.random.split(jax.random.key(0), 3)
        layers = jax.eval_shape(jax.vmap(lambda key: row.make(seed=key)), keys)
        stacked = jax.tree.leaves(nnx.state(layers, nnx.Param))
        assert [x.shape for x in stacked] == [(3, *x.shape) for x in expected]


@catalog.every_family
def test_layers_can_be_pickled(row):
    layer, x = row.make(), row.inputs()
    check_same(row(pickle.loads(pickle.dumps(layer)), *x), row(layer, *x))


# A layer, and the attribute that says its mode.
VIEWS = [
    ("Dropout", "deterministic"),
    ("BatchNorm", "use_running_average"),
    ("MultiHeadAttention", "deterministic"),
]


@pytest.mark.parametrize(("name", "flag"), VIEWS)
def test_modes_are_set_by_views_and_methods(name, flag):
    layer = catalog.BY_NAME[name].make(**{flag: False})
    view = nnx.view(layer, **{flag: True})
    assert (getattr(view, flag), getattr(layer, flag)) == (True, False)
    states = (jax.tree.leaves(nnx.state(m)) for m in (view, layer))
    assert all(a is b for a, b in zip(*states, strict=True))
    layer.eval()
    assert getattr(layer, flag) is True
    layer.train()
    assert getattr(layer, flag) is False
    assert nnx.view_info(layer).startswith(f"{name}:\n  {flag}: bool | None = None\n")
