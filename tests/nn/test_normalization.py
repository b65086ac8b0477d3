"""Normalization layers: order of operations, statistics, masks, named axes, groups.

Then dropout and pooling.

Their formulas in float64 are in `test_formulas.py`, their dtypes in `test_dtypes.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import meshes, random_arrays, tables
from tests.comparisons import raises
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


def test_promotion_of_a_training_batch_norm_gets_its_statistics_and_no_bias():
    seen = []

    def promote(args, **options):
        seen.append(([x if x is None else x.shape for x in args], options))
        return args

    make("BatchNorm", 3, promote_dtype=promote, use_bias=False)(shifted(4, 3))
    assert seen == [([(4, 3), (3,), (3,), (3,), None], {"dtype": None})]


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


def test_ref_backed_statistics_move_inside_plain_grad():
    layer = make("BatchNorm", 3, momentum=0.5)
    graphdef, params, statistics = nnx.split(layer, nnx.Param, nnx.BatchStat)
    statistics, x = nnx.to_refs(statistics), shifted(8, 3)

    @jax.jit
    @jax.grad
    def gradient(params, statistics):
        return nnx.merge(graphdef, params, statistics)(x).sum()

    np.testing.assert_allclose(gradient(params, statistics)["bias"][...], [8, 8, 8])
    moved = statistics["mean"][...]
    np.testing.assert_allclose(moved, 0.5 * np.float64(x).mean(0), rtol=1e-5)


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


@pytest.mark.parametrize("fast", [True, False])
def test_statistics_are_averaged_over_a_named_axis(fast):
    whole = make("BatchNorm", 3, momentum=0.0)
    layer = make("BatchNorm", 3, momentum=0.0, axis_name="b", use_fast_variance=fast)
    x = shifted(4, 5, 3)

    def call(x):
        model = nnx.clone(layer)
        return model(x), model.mean[...], model.var[...]

    y, mean, var = jax.jit(jax.vmap(call, axis_name="b"))(x)
    expected = np.reshape(in_one_program(whole, np.reshape(x, (20, 3))), (4, 5, 3))
    np.testing.assert_allclose(y, expected, atol=1e-4)
    for found, of_all in ((mean, whole.mean), (var, whole.var)):
        np.testing.assert_allclose(found, np.tile(of_all[...], (4, 1)), rtol=1e-4)


@pytest.mark.parametrize("fast", [True, False])
def test_with_a_mask_all_that_counts_along_a_named_axis_counts_the_same(fast):
    options = {"momentum": 0.0, "use_fast_variance": fast}
    layer = make("BatchNorm", 3, axis_name="b", **options)
    whole = make("BatchNorm", 3, **options)
    x = shifted(4, 5, 3)
    # Of the four parts one is empty.
    mask = np.arange(5) < np.array([[5], [1], [0], [3]])

    def call(x, mask):
        model = nnx.clone(layer)
        return model(x, mask=mask), model.mean[...], model.var[...]

    y, mean, var = jax.jit(jax.vmap(call, axis_name="b"))(x, mask[..., None])
    expected = whole(np.reshape(x, (20, 3)), mask=np.reshape(mask, (20, 1)))
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


# ------------------------------------------------------------------------------ dropout


def draw(seed, *path):
    """The key at the end of a chain of draws from a stream with this seed."""
    key = jax.random.key(seed)
    for count in path:
        key = jax.random.fold_in(key, count)
    return key


# ---------------------------------------------------------------------- what it drops


@pytest.mark.parametrize("rate", [0.1, 0.5, np.float32(0.75), np.float64(0.75)])
def test_kept_entries_are_scaled_up(rate):
    x = random_arrays.random(200, 50, seed=1)
    y = np.asarray(nnx.Dropout(rate, rngs=nnx.Rngs(0))(x))
    kept = y != 0
    assert y.dtype == np.float32
    np.testing.assert_allclose(kept.mean(), 1 - rate, atol=0.02)
    np.testing.assert_allclose(y[kept], np.asarray(x)[kept] / (1 - rate), rtol=1e-6)


def test_inputs_pass_through_as_the_same_object_or_as_zeros_without_a_draw():
    x = jnp.ones((2, 3), jnp.bfloat16)
    for deterministic in (True, None):
        layer = nnx.Dropout(0.5, deterministic=deterministic)
        assert layer(x, deterministic=True) is nnx.Dropout(0.0)(x) is x
    y = nnx.Dropout(1.0)(x)
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y, np.zeros((2, 3)))


@pytest.mark.parametrize("dims", [(0,), (-1,), [1, 2], (0, 1, 2)])
def test_broadcast_dims_share_their_fate(dims):
    layer = nnx.Dropout(0.5, broadcast_dims=dims, rngs=nnx.Rngs(0))
    small = np.array((4, 5, 6))
    small[[*dims]] = 1
    kept = jax.random.bernoulli(draw(0, 0, 0), 0.5, small.tolist())
    expected = np.broadcast_to(2.0 * kept, (4, 5, 6))
    np.testing.assert_array_equal(layer(jnp.ones((4, 5, 6))), expected)


@pytest.mark.parametrize("dims", [(), (1,), (0, 1)])
@pytest.mark.parametrize("is_jitted", [True, False])
@pytest.mark.parametrize("is_in_context", [True, False])
def test_explicit_sharding_is_kept(dims, is_jitted, is_in_context):
    mesh, spec = meshes.mesh_of("Explicit", x=4, y=2), jax.P("x", "y")
    x = jax.device_put(np.ones((8, 4), np.float32), jax.NamedSharding(mesh, spec))
    layer = nnx.Dropout(0.5, broadcast_dims=dims)

    def call(x):
        return layer(x, rngs=jax.random.key(0))

    expected = call(jnp.ones((8, 4)))
    context = jax.set_mesh(mesh) if is_in_context else jax.enable_x64(False)
    with context:
        y = (jax.jit(call) if is_jitted else call)(x)
    assert jax.typeof(y).sharding.spec == spec
    np.testing.assert_array_equal(y, expected)


# -------------------------------------------------------------- where keys come from


def test_a_missing_setting_is_an_error_with_the_ways_out():
    layer = nnx.Dropout(0.5, deterministic=None)
    ways = "Dropout(..., deterministic=", "layer(x, deter", "nnx.view(model, d"
    ways = ("model.train() or model.eval()", *ways)
    with raises(ValueError, "No `deterministic` argument", *ways):
        layer(jnp.ones(3))
    layer.eval()
    assert (layer(jnp.ones(3)) == 1).all()


def test_rate_is_checked_at_construction():
    for rate in (-0.1, 1.1, float("nan"), 50):
        with pytest.raises(ValueError, match=r"rate.*\[0, 1\]"):
            nnx.Dropout(rate)


@tables.cases("rngs", 0, jax.random.key(0), "dropout", np.zeros(2, np.uint32))
def test_something_other_than_rngs_is_refused(rngs):
    with pytest.raises(TypeError, match="rngs must be a Rngs, RngStream or None"):
        nnx.Dropout(0.5, rngs=rngs)
    if not isinstance(rngs, jax.Array):
        message = "rngs must be a Rngs, RngStream or jax.Array"
        with pytest.raises(TypeError, match=message):
            nnx.Dropout(0.5)(jnp.ones(3), rngs=rngs)


def test_absent_keys_and_streams_are_named():
    message = "`deterministic` is False, but no `rngs` argument was provided to Dropout"
    with pytest.raises(ValueError, match=message):
        nnx.Dropout(0.5)(jnp.ones(3))
    with pytest.raises(KeyError, match="dropout"):
        nnx.Dropout(0.5, rngs=nnx.Rngs(params=0))
    with pytest.raises(KeyError, match="dropout"):
        nnx.Dropout(0.5)(jnp.ones(3), rngs=nnx.Rngs(params=0))


def test_a_given_stream_is_forked_with_its_tag():
    rngs = nnx.Rngs(0, dropout=1)
    layer = nnx.Dropout(0.5, rngs=rngs.dropout)
    assert layer.rngs is not rngs.dropout
    assert (layer.rngs.tag, rngs.dropout.count[...]) == ("dropout", 1)
    assert layer.rngs.key[...] == draw(1, 0)


def test_rng_collection_names_the_stream_of_the_call_too():
    layer = nnx.Dropout(0.5, rng_collection="noise", rngs=nnx.Rngs(0, noise=5))
    rngs = nnx.Rngs(0, noise=7)
    layer(jnp.ones(3), rngs=rngs)
    assert (rngs.noise.count[...], rngs.default.count[...]) == (1, 0)


def test_rngs_of_the_call_take_precedence():
    layer = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    kept = jax.random.bernoulli(jax.random.key(9), 0.5, (16,))
    for key in (jax.random.key(9), jax.random.PRNGKey(9)):
        np.testing.assert_array_equal(layer(jnp.ones(16), rngs=key), 2.0 * kept)
    stream = nnx.RngStream(4, tag="any")
    layer(jnp.ones(16), rngs=stream)
    assert stream.count[...] == 1 and layer.rngs.count[...] == 0


def test_layer_with_rngs_stays_in_step_with_one_without():
    own = nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=0))
    given, rngs = nnx.Dropout(0.5), nnx.Rngs(dropout=0).fork()
    for _ in range(3):
        x = jnp.ones(32)
        np.testing.assert_array_equal(own(x), given(x, rngs=rngs))


# ------------------------------------------------------------------------------ pooling

LAYERS = {
    nnx.MaxPool: nnx.max_pool,
    nnx.MinPool: nnx.min_pool,
    nnx.AvgPool: nnx.avg_pool,
}
GLOBAL = {
    nnx.GlobalMaxPool: np.max,
    nnx.GlobalMinPool: np.min,
    nnx.GlobalAvgPool: np.mean,
}
every_pool = pytest.mark.parametrize("pool", LAYERS.values())
every_layer = pytest.mark.parametrize("cls", LAYERS)
every_global = pytest.mark.parametrize("cls", GLOBAL)


def windows(x, window, strides, pads):
    """All windows of ``x`` [batch, *axes, features], NaN where there is padding."""
    x = np.pad(np.float64(x), [(0, 0), *pads, (0, 0)], constant_values=np.nan)
    axes = tuple(range(1, x.ndim - 1))
    view = np.lib.stride_tricks.sliding_window_view(x, window, axes)
    view = view[(slice(None), *(slice(None, None, s) for s in strides))]
    return view.reshape(*view.shape[: x.ndim], -1)


@tables.cases(
    "window, strides, pads",
    ((2,), (1,), ((0, 0),)),
    ((3,), (2,), ((1, 1),)),
    ((2, 3), (2, 1), ((0, 1), (1, 1))),
)
def test_pooling_equals_numpy(window, strides, pads):
    x = random_arrays.random(2, *(7, 6)[: len(window)], 3)
    seen = windows(x, window, strides, pads)
    args = (x, window, strides, pads)
    np.testing.assert_array_equal(nnx.max_pool(*args), np.nanmax(seen, -1))
    np.testing.assert_array_equal(nnx.min_pool(*args), np.nanmin(seen, -1))
    for counts, expected in ((True, np.nan_to_num(seen).mean), (False, None)):
        expected = np.nanmean(seen, -1) if expected is None else expected(-1)
        y = nnx.avg_pool(*args, count_include_pad=counts)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@every_pool
@pytest.mark.parametrize("padding", ["SAME", ((1, 0), (0, 1))])
def test_any_number_of_batch_axes(pool, padding):
    x = random_arrays.random(2, 3, 4, 5, 2)
    options = {"strides": (1, 2), "padding": padding}
    y = pool(x, (2, 2), **options)
    assert y.shape[:2] == (2, 3)
    np.testing.assert_array_equal(pool(x[0], (2, 2), **options), y[0])
    np.testing.assert_array_equal(pool(x[1, 2], (2, 2), **options), y[1, 2])


@every_layer
@tables.cases(
    "args",
    (2, 2, 1),
    ([2, 2], [2, 2], [1, 1]),
    ((2, 2), np.array([2, 2]), [[1, 1], (1, 1)]),
    (np.int64(2), (2, 2), ((1, 1), 1)),
    (np.int64(2), np.array([2, 2]), np.int32(1)),
    (2, np.int64(2), np.ones((2, 2), int)),
)
def test_ints_and_lists_are_taken_also_by_layers(cls, args):
    x, pool = random_arrays.random(1, 6, 5, 2), LAYERS[cls]
    expected = pool(x, (2, 2), (2, 2), ((1, 1), (1, 1)))
    np.testing.assert_array_equal(pool(x, *args), expected)
    np.testing.assert_array_equal(cls(*args)(x), expected)


@every_layer
def test_strides_are_one_and_padding_none_by_default(cls):
    x, pool = random_arrays.random(1, 5, 2), LAYERS[cls]
    expected = pool(x, (2,), (1,), ((0, 0),))
    for y in (pool(x, (2,)), cls(2)(x), cls((2,), None, "VALID")(x)):
        np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(cls(2, 2, "SAME")(x), pool(x, (2,), (2,), "SAME"))
    args = (2, 2, "SAME", False)  # padding counts in averages unless told otherwise
    np.testing.assert_array_equal(nnx.AvgPool(*args)(x), nnx.avg_pool(x, *args))


def test_an_int_is_the_extent_along_all_spatial_axes():
    shapes = [
        jax.eval_shape(lambda x: nnx.max_pool(x, 3), jnp.ones(shape)).shape
        for shape in [(1, 6, 6, 6, 2), (6, 2)]
    ]
    assert shapes == [(1, 4, 4, 4, 2), (4, 2)]


@tables.cases(
    "args",
    ((2, 2, 2), None, "VALID"),
    ((2,), (1, 1), "VALID"),
    ((2,), None, ((1, 1), (1, 1))),
    ((2,), None, ((1, 1, 1),)),
)
@every_layer
def test_wrong_lengths_are_refused(cls, args):
    x = random_arrays.random(1, 6, 2)
    with pytest.raises(AssertionError, match="window_shape"):
        LAYERS[cls](x, *args)
    with pytest.raises(AssertionError, match="window_shape"):
        cls((2, 2, 2))(x)


@pytest.mark.parametrize("count_include_pad", [True, False])
def test_averages_keep_float_dtypes_and_those_of_integers_are_float(count_include_pad):
    options = {"padding": "SAME", "count_include_pad": count_include_pad}
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        x = jnp.ones((1, 4, 2), dtype)
        assert nnx.eval_shape(lambda x: nnx.avg_pool(x, 2, **options), x).dtype == dtype
    y = nnx.avg_pool(jnp.full((1, 4, 1), 100, jnp.int8), (4,))
    np.testing.assert_array_equal(y, [[[100.0]]])


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint32, jnp.bfloat16])
def test_extrema_keep_the_dtype(dtype):
    x = jnp.arange(1, 9).astype(dtype).reshape(1, 8, 1)
    top = nnx.max_pool(x, (2,), (2,), ((1, 1),))
    low = nnx.min_pool(x, (2,), (2,), ((1, 1),))
    assert top.dtype == low.dtype == dtype
    np.testing.assert_array_equal(top.ravel().astype(int), [1, 3, 5, 7, 8])
    np.testing.assert_array_equal(low.ravel().astype(int), [1, 2, 4, 6, 8])


def test_pool_takes_any_reduction():
    x = jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 4, 1)
    y = nnx.pool(x, 1.0, jax.lax.mul, (2,), (1,), "VALID")
    np.testing.assert_array_equal(y.ravel(), [2, 6, 12])


# ----------------------------------------------------------------------------- layers


@every_layer
def test_arguments_are_hashable_attributes(cls):
    layer = cls([2, np.int64(3)], np.array([1, 2]), [[1, 0], np.int64(1)])
    attributes = (layer.window_shape, layer.strides, layer.padding)
    assert attributes == ((2, 3), (1, 2), ((1, 0), 1))
    assert hash(attributes) is not None
    same = cls((2, 3), (1, 2), ((1, 0), 1))
    assert nnx.graphdef(layer) == nnx.graphdef(same)
    assert not nnx.to_flat_state(nnx.state(layer))


@every_global
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_global_pooling_reduces_all_spatial_axes(cls, dtype):
    x = (20 * random_arrays.random(2, 5, 6, 3)).astype(dtype)
    y = cls()(x)
    expected = GLOBAL[cls](np.float64(x), (1, 2))
    assert y.shape == (2, 3)
    is_average = cls is nnx.GlobalAvgPool
    assert y.dtype == (jnp.float32 if is_average and dtype == jnp.int8 else dtype)
    rtol = 1e-2 if dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(np.float64(y), expected, rtol=rtol, atol=2e-2)


@every_global
@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_number_of_spatial_axes_frees_the_batch_axes(cls, batch):
    x = random_arrays.random(*batch, 5, 6, 3)
    expected = GLOBAL[cls](np.float64(x), (-3, -2))
    np.testing.assert_allclose(cls(2)(x), expected, rtol=1e-5, atol=1e-6)


@every_global
@tables.cases("number, shape", (None, (4, 3)), (None, (3,)), (2, (5, 3)), (1, (3,)))
def test_inputs_without_spatial_axes_are_refused(cls, number, shape):
    x = random_arrays.random(*shape)
    where = f"at {cls.__name__}\n  inputs: {jax.typeof(x)}"
    with raises(ValueError, f"num_spatial_axes={number} found no spatial axes", where):
        cls(number)(x)
    for number in (0, -1):
        with pytest.raises(ValueError, match=f"{cls.__name__} needs a positive"):
            cls(number)
    with pytest.raises(TypeError, match="Only arrays of numeric types"):
        cls()("image")


@pytest.mark.parametrize("shape", [(0, 5, 6), (2, 0, 6), (3, 5, 6)])
def test_group_norm_expects_its_number_of_features(shape):
    with pytest.raises(TypeError, match=r"GroupNorm expects 64 features, got \(6,\)"):
        nnx.GroupNorm(64, rngs=nnx.Rngs(0))(jnp.ones(shape))
