"""Normalization: formulas, order of operations, statistics, masks, axes, groups."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import catalog, comparisons, exact, random_arrays, tables
from tests.programs import in_one_program

shifted = functools.partial(random_arrays.random, mean=3, scale=2)


def make(name, *args, **options):
    return getattr(nnx, name)(*args, **options, rngs=nnx.Rngs(0))


def identity(args, **_):
    return args


# ------------------------------------------------------------------------- arithmetic


def reference(layer, x, axes, epsilon, mask=None):
    """The order of operations that the contract fixes, in jnp."""
    wide = jnp.asarray(x, jnp.promote_types(x.dtype, jnp.float32))
    mean_of = functools.partial(jnp.mean, axis=axes, keepdims=True, where=mask)
    is_rms = isinstance(layer, nnx.RMSNorm)
    mean = jnp.zeros((1, 1)) if is_rms else mean_of(wide)
    if is_rms:
        variance = mean_of(wide * wide)
    elif layer.use_fast_variance:
        variance = jnp.maximum(0, mean_of(wide * wide) - mean * mean)
    else:
        variance = mean_of((wide - mean) * (wide - mean))
    y = x - mean
    y *= jax.lax.rsqrt(variance + epsilon) * layer.scale[...][None]
    return y if is_rms else y + layer.bias[...][None]


@tables.cases(
    "name, fast, dtype",
    ("BatchNorm", True, jnp.float32),
    ("RMSNorm", True, jnp.float32),
    *(
        ("LayerNorm", fast, dtype)
        for fast in (True, False)
        for dtype in (jnp.float32, jnp.bfloat16)
    ),
)
def test_norms_are_bit_equal_to_the_reference_formula(name, fast, dtype):
    layer = make(name, 8, use_fast_variance=fast, promote_dtype=identity)
    for n, (_, param) in enumerate(nnx.to_flat_state(nnx.state(layer, nnx.Param))):
        param[...] = shifted(8, seed=n)
    x, axes, epsilon, options = shifted(6, 8).astype(dtype), (1,), 1e-6, {}
    if name == "BatchNorm":
        axes, epsilon, options = (0,), 1e-5, {"mask": jnp.arange(6)[:, None] < 5}
    expected = reference(layer, x, axes, epsilon, **options)
    np.testing.assert_array_equal(layer(x, **options), expected)


@tables.cases("name", "BatchNorm", "LayerNorm", "RMSNorm", "InstanceNorm", "GroupNorm")
def test_statistics_of_halves_are_computed_in_float32(name):
    args = (4, 2) if name == "GroupNorm" else (4,)
    layer = make(name, *args, dtype=jnp.float16)
    # The squares of these don't fit into float16.
    x = jnp.asarray(np.tile([300.0, 500.0, 700.0, 900.0], (3, 1)), jnp.float32)
    assert np.isfinite(in_one_program(layer, x)).all()


def test_slow_variance_survives_a_large_mean():
    x = 1e4 + shifted(1, 1000, mean=0)
    exact = np.float64(x)
    exact = (exact - exact.mean()) / exact.std()
    errors = {}
    for fast in (True, False):
        layer = make("LayerNorm", 1000, use_fast_variance=fast)
        y = np.asarray(in_one_program(layer, x))
        assert np.isfinite(y).all()
        errors[fast] = np.abs(y - exact).max()
    assert errors[False] < 1e-3 < errors[True]


# -------------------------------------------------------------------------- BatchNorm


def test_batch_norm_can_be_closed_over_if_it_only_evaluates():
    layer = make("BatchNorm", 3)
    layer.eval()
    assert jax.jit(lambda x: layer(x))(shifted(4, 3)).shape == (4, 3)


def test_no_gradient_flows_into_the_stored_statistics():
    layer = make("BatchNorm", 3)

    @jax.jit
    @jax.grad
    def gradient(x):
        model = nnx.clone(layer)
        model(x)
        return model.mean[...].sum() + model.var[...].sum()

    np.testing.assert_array_equal(gradient(shifted(4, 3)), np.zeros((4, 3)))


# ------------------------------------------------------------------------------ masks


@pytest.mark.parametrize("fast", [True, False])
def test_masked_statistics_are_those_of_what_counts(fast):
    layer = make("BatchNorm", 3, use_fast_variance=fast, momentum=0.5)
    x = shifted(2, 6, 3)
    in_one_program(layer, x, mask=jnp.arange(6)[:, None] < 4)
    counted = np.float64(x)[:, :4]
    np.testing.assert_allclose(layer.mean[...], 0.5 * counted.mean((0, 1)), rtol=1e-5)
    variance = 0.5 + 0.5 * counted.var((0, 1))
    np.testing.assert_allclose(layer.var[...], variance, rtol=1e-5)


def test_empty_mask_leaves_the_statistics_and_gives_no_nan():
    layer, x = make("BatchNorm", 3, momentum=0.3), shifted(6, 3)
    empty = jnp.zeros((6, 1), bool)
    layer(x)
    expected, before = layer(x, use_running_average=True), nnx.state(nnx.clone(layer))
    np.testing.assert_array_equal(layer(x, mask=empty), expected)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(layer), before)
    loss = lambda x: nnx.clone(layer)(x, mask=empty).sum()  # noqa: E731
    assert np.isfinite(jax.jit(jax.grad(loss))(x)).all()


def test_empty_mask_of_one_feature_concerns_that_feature():
    layer = make("BatchNorm", 3)
    layer(shifted(6, 3), mask=jnp.ones((6, 3), bool).at[:, 1].set(False))
    assert [bool(mean) for mean in layer.mean[...]] == [True, False, True]


@pytest.mark.any_arguments
def test_rms_norm_takes_its_mask_by_position_as_a_list_too():
    layer = make("RMSNorm", 4)
    x, mask = shifted(5, 4), [True, False, True, True]
    counted = np.float64(x)[:, [0, 2, 3]]
    expected = np.float64(x) / np.sqrt((counted**2).mean(-1, keepdims=True))
    np.testing.assert_allclose(layer(x, mask), expected, rtol=1e-5)
    with pytest.raises(TypeError):
        make("LayerNorm", 4)(x, mask)
    with pytest.raises(ValueError, match="mask must be boolean"):
        layer(x, [1, 0, 1, 1])


# ------------------------------------------------------------------------- named axes


# Of the four parts of the mask one is empty.
@tables.cases("counts", None, [5, 1, 0, 3])
@pytest.mark.parametrize("fast", [True, False])
def test_all_that_counts_along_a_named_axis_counts_the_same(fast, counts):
    options = {"momentum": 0.0, "use_fast_variance": fast}
    layer = make("BatchNorm", 3, axis_name="b", **options)
    whole, x, mask = make("BatchNorm", 3, **options), shifted(4, 5, 3), None
    if counts is not None:
        mask = np.arange(20).reshape(4, 5, 1) % 5 < np.reshape(counts, (4, 1, 1))

    def call(x, mask):
        model = nnx.clone(layer)
        return model(x, mask=mask), model.mean[...], model.var[...]

    y, mean, var = jax.jit(jax.vmap(call, axis_name="b"))(x, mask)
    flat = None if mask is None else mask.reshape(20, 1)
    expected = whole(np.reshape(x, (20, 3)), mask=flat)
    np.testing.assert_allclose(y, np.reshape(expected, (4, 5, 3)), atol=1e-4)
    for found, of_all in ((mean, whole.mean), (var, whole.var)):
        np.testing.assert_allclose(found, np.tile(of_all[...], (4, 1)), rtol=1e-4)


def test_where_nothing_counts_along_a_named_axis_the_statistics_stay():
    layer = make("BatchNorm", 3, axis_name="b")

    def call(x, mask):
        model = nnx.clone(layer)
        return model(x, mask=mask), model.mean[...]

    def total(x):
        y, mean = jax.vmap(call, axis_name="b")(x, jnp.zeros((2, 5, 1), bool))
        return y.sum(), mean

    grads, mean = jax.jit(jax.grad(total, has_aux=True))(shifted(2, 5, 3))
    assert np.isfinite(grads).all()
    np.testing.assert_array_equal(mean, np.zeros((2, 3)))


def test_a_masked_sample_may_be_divided_along_a_named_axis():
    mask = np.arange(12) % 5 != 0
    x = shifted(4, 12)
    for name in ("LayerNorm", "RMSNorm"):
        part = make(name, 6, axis_name="b", use_scale=False)
        whole = make(name, 12, use_scale=False)
        halves = jax.vmap(
            lambda x, mask, layer=part: layer(x, mask=mask), (1, 0), 1, axis_name="b"
        )(np.reshape(x, (4, 2, 6)), np.reshape(mask, (2, 6)))
        expected = whole(x, mask=mask)
        np.testing.assert_allclose(np.reshape(halves, (4, 12)), expected, atol=1e-5)


# -------------------------------------------------------------------- axes and groups


@tables.cases(
    "name, args, options, message",
    ("LayerNorm", (4,), {"reduction_axes": 3}, "out of bounds"),
    ("LayerNorm", (4,), {"reduction_axes": -4}, "out of bounds"),
    ("GroupNorm", (4, 2), {"reduction_axes": (1,)}, "must include the last axis"),
    *(
        ("InstanceNorm", (4,), {"feature_axes": axes}, "the leading dimension")
        for axes in (0, -3, (0, 2))
    ),
)
def test_axes_that_do_not_fit_are_refused(name, args, options, message):
    with pytest.raises(ValueError, match=message):
        make(name, *args, **options)(shifted(2, 3, 4))


EITHER = "Either `num_groups` or `group_size` should be specified"


@tables.cases(
    "sizes, message",
    ((32, 2), EITHER),
    ((None, None), EITHER),
    ((None, 4), "not multiple of the group size"),
    ((None, 0), "not multiple of the group size"),
    ((4, None), "does not divide the number"),
    ((0, None), "does not divide the number"),
    ((-2, None), "does not divide the number"),
    ((2.0, None), "does not divide the number"),
    ((), r"groups \(32\) does not divide.*\(6\)"),
)
def test_groups_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        make("GroupNorm", 6, *sizes)


def test_groups_know_their_sizes():
    assert make("GroupNorm", 64).group_size == 2
    assert make("GroupNorm", 6, 2, use_scale=False).num_features == 6


# ------------------------------------------------------- BatchNorm in a mapped function


def normalize(norm, x):
    return norm(x)


@pytest.mark.parametrize("options", [{}, {"graph": False}, {"graph_updates": False}])
def test_the_advice_for_a_mapped_batchnorm_leads_to_the_batch_as_a_whole(options):
    x = jnp.sin(jnp.arange(24.0)).reshape(8, 3)
    norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    way_out = "BatchNorm(..., axis_name='batch')", "nnx.vmap(..., axis_name='batch')"
    mapped = functools.partial(nnx.vmap, normalize, in_axes=(None, 0), **options)
    with comparisons.raises(ValueError, "got axis spec None", *way_out):
        mapped()(norm, x)
    with comparisons.raises(ValueError, "BatchNorm(..., axis_name='i')"):
        mapped(axis_name="i")(norm, x)
    named = nnx.BatchNorm(3, axis_name="batch", rngs=nnx.Rngs(0))
    np.testing.assert_allclose(
        mapped(axis_name="batch")(named, x), norm(x), rtol=1e-5, atol=1e-6
    )
    states = map(catalog.state_of, (named, norm))
    for a, b in zip(*[state.values() for state in states], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["BatchNorm", "LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("is_jitted", [False, True])
def test_an_axis_that_nothing_maps_is_named(name, is_jitted):
    norm = getattr(nnx, name)(3, axis_name="batch", rngs=nnx.Rngs(0))
    call = nnx.jit(normalize) if is_jitted else normalize
    words = "unbound axis name: batch", "has axis_name='batch'", "Call it within"
    with comparisons.raises(NameError, *words):
        call(norm, jnp.ones((2, 3)))
    norm.eval()
    if name == "BatchNorm":
        call(norm, jnp.ones((2, 3)))


# --------------------------------------------------------------------------- statistics

# Name, arguments, options, shape of the inputs, the axes that are reduced (of a
# GroupNorm, after its last axis became one of groups and one of their members), the
# shape of scale and bias.
NORMS = [
    ("BatchNorm", (6,), {}, (4, 5, 6), (0, 1), (6,)),
    ("BatchNorm", (4,), {"axis": 1}, (5, 4, 3), (0, 2), (4, 1)),
    ("BatchNorm", (4,), {"axis": [-1]}, (4,), (), (4,)),
    ("BatchNorm", (12,), {"axis": (1, -1)}, (6, 3, 2, 4), (0, 2), (3, 1, 4)),
    ("LayerNorm", (6,), {}, (4, 5, 6), (2,), (6,)),
    ("LayerNorm", (6,), {"reduction_axes": (1, -1)}, (4, 5, 2, 6), (1, 3), (6,)),
    ("LayerNorm", (6,), {"reduction_axes": (-2, -1)}, (4, 5, 6), (1, 2), (6,)),
    ("LayerNorm", (6,), {"reduction_axes": 1}, (4, 5, 6), (1,), (6,)),
    ("LayerNorm", (6,), {"epsilon": 0.1}, (4, 6), (1,), (6,)),
    ("LayerNorm", (12,), {"feature_axes": (-1, 1)}, (5, 3, 2, 4), (3,), (3, 1, 4)),
    ("RMSNorm", (6,), {}, (4, 5, 6), (2,), (6,)),
    ("RMSNorm", (6,), {"reduction_axes": (1, 2)}, (4, 5, 6), (1, 2), (6,)),
    ("InstanceNorm", (6,), {}, (4, 5, 2, 6), (1, 2), (6,)),
    ("InstanceNorm", (18,), {"feature_axes": (2, -1)}, (2, 4, 3, 6), (1,), (3, 6)),
    ("InstanceNorm", (4,), {"feature_axes": (1,)}, (2, 4, 3, 6), (2, 3), (4, 1, 1)),
    *(
        ("GroupNorm", (6, *sizes), {}, shape, axes, (6,))
        for *shape, axes in [(4, 6, (2,)), (4, 5, 6, (1, 3)), (2, 3, 2, 6, (1, 2, 4))]
        for sizes in [(2, None), (None, 3), (6, None), (1, None)]
    ),
    ("GroupNorm", (6, 2), {}, (6,), (1,), (6,)),
    *(
        ("GroupNorm", (6, 2), {"reduction_axes": axes, "epsilon": 0.1}, shape, of, (6,))
        for shape, axes, of in [
            ((2, 3, 4, 5, 6), (-3, -2, -1), (2, 3, 5)),
            ((2, 3, 4, 5, 6), (2, -1), (2, 5)),
            ((2, 3, 4, 5, 6), (4,), (5,)),
            ((2, 3, 4, 5, 6), -1, (5,)),
            ((2, 3, 4, 5, 6), (0, 1, 2, 3, 4), (0, 1, 2, 3, 5)),
        ]
    ),
]


@exact.in_float64
@tables.cases("name, args, options, shape, axes, features", *NORMS)
def test_norms_normalize_scale_and_shift(name, args, options, shape, axes, features):
    layers = [
        exact.make(name, *args, use_fast_variance=x, **options) for x in (True, False)
    ]
    x, mask = 3 + exact.random(*shape), exact.random(*shape, seed=1) > -0.5
    mask[:1] = mask[..., ::2] = True  # something counts everywhere
    if len(shape) > 2:
        mask[:, 0] = True
    else:
        mask[:] = True
    calls = [(layer, where) for layer in layers for where in (None, mask)]
    outputs = nnx.jit(lambda c, x: [m(x, mask=where) for m, where in c])(calls, x)
    grouped = shape
    if name == "GroupNorm":
        grouped = (*shape[:-1], args[1] or shape[-1] // args[2], -1)
    epsilon = options.get("epsilon", 1e-5 if name == "BatchNorm" else 1e-6)
    for (layer, where), output in zip(calls, outputs, strict=True):
        counted = True if where is None else where.reshape(grouped)
        over = {"axis": axes, "keepdims": True, "where": counted}
        y = x.reshape(grouped)
        mean = 0 if name == "RMSNorm" else y.mean(**over)
        square = ((y - mean) ** 2).mean(**over)
        y = ((y - mean) / np.sqrt(square + epsilon)).reshape(shape)
        y = y * exact.value(layer.scale).reshape(features)
        if name != "RMSNorm":
            y = y + exact.value(layer.bias).reshape(features)
        exact.agree(output, y, 1e-10)  # the variance of two numbers may be small


@exact.in_float64
@tables.cases("axis, axes", (-1, 0), ((1, -1), (0, 2)), (1, (0, 2, 3)))
def test_running_statistics_move_by_the_momentum(axis, axes):
    x = 3 + exact.random(*((4, 6) if axes == 0 else (4, 3, 5, 2)))
    layer = exact.make("BatchNorm", np.size(x.mean(axes)), momentum=0.75, axis=axis)
    mean, var = exact.value(layer.mean), exact.value(layer.var)
    call = nnx.jit(lambda layer, x: layer(x))
    for batch in (x, 2 * x):
        call(layer, batch)
        mean = 0.75 * mean + 0.25 * batch.mean(axes).ravel()
        var = 0.75 * var + 0.25 * batch.var(axes).ravel()
    # These are stored in float32, whatever the inputs are.
    assert layer.mean.dtype == layer.var.dtype == jnp.float32
    np.testing.assert_allclose(layer.mean[...], mean, rtol=2e-7)
    np.testing.assert_allclose(layer.var[...], var, rtol=2e-7)


@exact.in_float64
def test_evaluation_uses_the_running_statistics_and_leaves_them():
    layer, x = exact.make("BatchNorm", 6, use_running_average=True), exact.random(8, 6)
    kept = layer.mean[...]
    mean, var = np.float64(exact.value(layer.mean)), np.float64(exact.value(layer.var))
    y = (x - mean) / np.sqrt(var + 1e-5) * exact.value(layer.scale) + exact.value(
        layer.bias
    )
    exact.agree(in_one_program(layer, x), y)
    layer(x)
    assert layer.mean[...] is kept


@exact.in_float64
@pytest.mark.parametrize("fast", [True, False])
def test_statistics_of_complex_numbers(fast):
    options = {"use_scale": False, "use_bias": False, "use_fast_variance": fast}
    x = exact.random(4, 6) + 2j * exact.random(4, 6, seed=1)
    actual = in_one_program(exact.make("LayerNorm", 6, **options), x)
    assert actual.dtype == jnp.complex128
    y = x - x.mean(1, keepdims=True)
    y /= np.sqrt(x.var(1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(actual, y, rtol=1e-12)
    # A BatchNorm keeps the real part of the mean.
    layer = exact.make("BatchNorm", 6, momentum=0.0, **options)
    in_one_program(layer, x)
    np.testing.assert_allclose(layer.mean[...], x.real.mean(0), rtol=2e-7)
    np.testing.assert_allclose(layer.var[...], x.var(0), rtol=2e-7)


# ------------------------------------------------------- a scale stored without its one


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_an_offset_is_added_to_the_scale_which_starts_at_a_factor_of_one(name):
    x = np.asarray(shifted(5, 8, mean=0))
    unit = np.float64(x)
    if name == "LayerNorm":
        unit = unit - unit.mean(-1, keepdims=True)
    unit = unit / np.sqrt((unit**2).mean(-1, keepdims=True) + 1e-6)
    layer = make(name, 8, scale_offset=1.0)
    assert not layer.scale[...].any()
    np.testing.assert_allclose(layer(x), unit, rtol=1e-5, atol=1e-5)
    layer.scale[...] = w = shifted(8, mean=0)
    np.testing.assert_allclose(
        layer(x), unit * (1 + np.float64(w)), rtol=1e-5, atol=1e-5
    )
    assert make(name, 8, scale_offset=0.5).scale[0] == 0.5
    halves = make(name, 8, scale_offset=1.0, scale_init=nnx.initializers.constant(2))
    assert halves.scale[0] == 2.0
    without = make(name, 8, scale_offset=1.0, use_scale=False)
    np.testing.assert_allclose(without(x), unit, rtol=1e-5, atol=1e-5)


def test_the_sum_of_offset_and_scale_is_not_rounded_to_bfloat16():
    x, w = (np.asarray(shifted(*s, mean=0), jnp.bfloat16) for s in ((200, 8), (8,)))
    layer = make("RMSNorm", 8, scale_offset=1.0, param_dtype=jnp.bfloat16)
    layer.scale[...] = w
    y, wide = layer(x), np.float32(x)
    # As Gemma3RMSNorm of transformers 5.24: no bit differed in 32,000 outputs.
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    expected = (expected * (1 + np.float32(w))).astype(jnp.bfloat16)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.float32(y), np.float32(expected))


def test_weights_stored_without_their_one_come_back_byte_for_byte(tmp_path):
    model = nnx.Dict(norm=make("RMSNorm", 8, scale_offset=1.0))
    w = np.asarray(shifted(8, mean=0))
    nnx.weights.load({"norm.weight": w}, model, {"norm": "norm"})
    nnx.weights.save(tmp_path / "x.safetensors", model, {"norm": "norm"})
    assert (tmp_path / "x.safetensors").read_bytes().endswith(w.tobytes())
