"""BatchNorm, LayerNorm, RMSNorm: closed forms, running statistics, masks, dtypes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import random_arrays
from tests.programs import in_one_program

random = functools.partial(random_arrays.random, mean=3, scale=2)


def standardized(x, axes, epsilon, mask=None):
    """The closed form in float64; without scale and bias."""
    x = np.float64(x)
    where = True if mask is None else np.broadcast_to(mask, x.shape)
    mean = x.mean(axes, keepdims=True, where=where)
    variance = x.var(axes, keepdims=True, where=where)
    return (x - mean) / np.sqrt(variance + epsilon)


def reference(x, axes, epsilon, scale, bias, fast, centered=True, mask=None):
    """The order of operations that the contract fixes, in jnp."""
    wide = jnp.asarray(x, jnp.promote_types(x.dtype, jnp.float32))
    mean_of = functools.partial(jnp.mean, axis=axes, keepdims=True, where=mask)
    mean = mean_of(wide) if centered else jnp.zeros(())
    if not centered:
        variance = mean_of(wide * wide)
    elif fast:
        variance = jnp.maximum(0, mean_of(wide * wide) - mean * mean)
    else:
        variance = mean_of((wide - mean) * (wide - mean))
    y = x - mean.reshape(mean.shape or (1,) * x.ndim)
    y *= jax.lax.rsqrt(variance + epsilon) * scale
    return y if bias is None else y + bias


def identity(args, **_):
    return args


def randomized(layer):
    """Gives the Params values that are neither one nor zero."""
    for n, param in enumerate((layer.scale, getattr(layer, "bias", None))):
        if param is not None:
            param[...] = random(*param.shape, seed=n).astype(param.dtype)
    return layer


# ------------------------------------------------------------------ BatchNorm


@pytest.mark.parametrize(
    ("axis", "shape"), [(-1, (8, 4)), (1, (5, 4, 3)), ([-1], (4,))]
)
@pytest.mark.parametrize("fast", [True, False])
def test_batch_norm_standardizes_over_all_but_the_feature_axis(axis, shape, fast):
    layer = nnx.BatchNorm(4, axis=axis, use_fast_variance=fast, rngs=nnx.Rngs(0))
    x = random(*shape)
    feature = np.ravel(axis)[0] % len(shape)
    axes = tuple(a for a in range(len(shape)) if a != feature)
    np.testing.assert_allclose(
        in_one_program(layer, x), standardized(x, axes, 1e-5), atol=1e-4
    )


def test_several_feature_axes_share_one_flat_statistic():
    layer = nnx.BatchNorm(12, axis=(1, -1), rngs=nnx.Rngs(0))
    x = random(6, 3, 5, 4)
    np.testing.assert_allclose(
        in_one_program(layer, x), standardized(x, (0, 2), 1e-5), atol=1e-4
    )
    mean = 0.01 * np.float64(x).mean((0, 2)).ravel()
    np.testing.assert_allclose(layer.mean[...], mean, rtol=1e-5)


def test_running_statistics_move_towards_those_of_the_batch():
    layer = nnx.BatchNorm(4, momentum=0.75, rngs=nnx.Rngs(0))
    mean, var = np.zeros(4), np.ones(4)
    for seed in range(3):
        x = random(16, 4, seed=seed)
        layer(x)
        mean = 0.75 * mean + 0.25 * np.float64(x).mean(0)
        var = 0.75 * var + 0.25 * np.float64(x).var(0)
    np.testing.assert_allclose(layer.mean[...], mean, rtol=1e-5)
    np.testing.assert_allclose(layer.var[...], var, rtol=1e-5)


def test_evaluation_uses_the_running_statistics_and_leaves_them():
    layer = nnx.BatchNorm(3, use_running_average=True, rngs=nnx.Rngs(0))
    layer.mean[...], layer.var[...] = jnp.array([1.0, 2, 3]), jnp.array([4.0, 9, 1])
    mean = layer.mean[...]
    y = layer(jnp.array([[3.0, 5.0, 3.5]]))
    np.testing.assert_allclose(y, [[1.0, 1.0, 0.5]], rtol=1e-4)
    assert layer.mean[...] is mean


def test_call_overrides_the_attribute():
    layer = nnx.BatchNorm(3, use_running_average=True, rngs=nnx.Rngs(0))
    layer(random(4, 3), use_running_average=False)
    assert (layer.mean[...] != 0).all()


def test_use_running_average_must_be_said_somewhere():
    layer = nnx.BatchNorm(3, use_running_average=None, rngs=nnx.Rngs(0))
    message = "No `use_running_average` argument was provided to BatchNorm"
    with pytest.raises(ValueError, match=message):
        layer(random(4, 3))


def test_train_and_eval_and_view_switch():
    layer = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    layer.eval()
    assert layer.use_running_average is True
    layer.train()
    assert layer.use_running_average is False
    view = nnx.view(layer, use_running_average=True)
    assert view.use_running_average is True
    assert view.mean is layer.mean
    info = nnx.view_info(layer)
    assert info.startswith("BatchNorm:\n  use_running_average: bool | None = None\n")


@pytest.mark.parametrize("param_dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_statistics_are_float32_whatever_the_other_dtypes(param_dtype, dtype):
    layer = nnx.BatchNorm(3, param_dtype=param_dtype, dtype=dtype, rngs=nnx.Rngs(0))
    layer(random(4, 3).astype(jnp.bfloat16))
    assert layer.scale[...].dtype == layer.bias[...].dtype == param_dtype
    assert layer.mean[...].dtype == layer.var[...].dtype == jnp.float32


def test_running_mean_of_complex_inputs_keeps_the_real_part():
    layer = nnx.BatchNorm(3, momentum=0.5, rngs=nnx.Rngs(0))
    x = jax.lax.complex(random(4, 3), random(4, 3, seed=1))
    assert layer(x).dtype == jnp.complex64
    assert layer.mean[...].dtype == layer.var[...].dtype == jnp.float32
    np.testing.assert_allclose(layer.mean[...], 0.5 * x.real.mean(0), rtol=1e-5)
    variance = np.complex128(x).var(0)
    np.testing.assert_allclose(layer.var[...], 0.5 + 0.5 * variance, rtol=1e-4)


def test_statistics_draw_no_keys_and_scale_comes_before_bias():
    rngs = nnx.Rngs(0)
    normal = nnx.initializers.normal()
    layer = nnx.BatchNorm(3, scale_init=normal, bias_init=normal, rngs=rngs)
    assert rngs.default.count[...] == 2
    keys = [jax.random.fold_in(jax.random.key(0), n) for n in range(2)]
    np.testing.assert_array_equal(layer.scale[...], normal(keys[0], (3,), jnp.float32))
    np.testing.assert_array_equal(layer.bias[...], normal(keys[1], (3,), jnp.float32))


def test_no_gradient_flows_into_the_stored_statistics():
    layer = nnx.BatchNorm(3, rngs=nnx.Rngs(0))

    def stored_mean(x):
        model = nnx.clone(layer)
        model(x)
        return model.mean[...].sum() + model.var[...].sum()

    np.testing.assert_array_equal(
        jax.grad(stored_mean)(random(4, 3)), jnp.zeros((4, 3))
    )


def test_gradient_flows_through_the_statistics_of_the_batch():
    layer = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    grad = jax.grad(lambda x: (nnx.clone(layer)(x) ** 3).sum())(random(4, 3))
    # The output does not change if the batch is shifted.
    np.testing.assert_allclose(grad.sum(0), jnp.zeros(3), atol=1e-4)


def test_ref_backed_statistics_move_inside_plain_grad():
    layer = nnx.BatchNorm(3, momentum=0.5, rngs=nnx.Rngs(0))
    graphdef, params, statistics = nnx.split(layer, nnx.Param, nnx.BatchStat)
    statistics = nnx.map_state(lambda _, variable: variable.copy(ref=True), statistics)
    x = random(8, 3)

    @jax.jit
    def gradient(params, statistics):
        model = lambda params: nnx.merge(graphdef, params, statistics)  # noqa: E731
        return jax.grad(lambda params: model(params)(x).sum())(params)

    np.testing.assert_allclose(gradient(params, statistics)["bias"][...], [8, 8, 8])
    moved = statistics["mean"][...]
    np.testing.assert_allclose(moved, 0.5 * np.float64(x).mean(0), rtol=1e-5)


@pytest.mark.parametrize("bad", [(4, 5), (4, 2)])
@pytest.mark.parametrize("use_scale", [True, False])
def test_failed_call_leaves_the_statistics(bad, use_scale):
    layer = nnx.BatchNorm(3, use_scale=use_scale, use_bias=use_scale, rngs=nnx.Rngs(0))
    before = layer.mean[...], layer.var[...]
    with pytest.raises(TypeError):
        layer(random(*bad))
    assert (layer.mean[...], layer.var[...]) == before


def test_closed_over_layer_can_not_train():
    layer = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    message = "Cannot mutate BatchStat from a different trace level"
    with pytest.raises(nnx.errors.TraceContextError, match=message):
        jax.jit(lambda x: layer(x))(random(4, 3))
    layer.eval()
    assert jax.jit(lambda x: layer(x))(random(4, 3)).shape == (4, 3)


@pytest.mark.parametrize("fast", [True, False])
def test_batch_norm_mask_selects_what_counts(fast):
    layer = nnx.BatchNorm(3, use_fast_variance=fast, momentum=0.5, rngs=nnx.Rngs(0))
    x, mask = random(2, 6, 3), jnp.arange(6)[:, None] < 4
    y = in_one_program(layer, x, mask=mask)
    np.testing.assert_allclose(y, standardized(x, (0, 1), 1e-5, mask), atol=1e-4)
    mean = 0.5 * np.float64(x)[:, :4].mean((0, 1))
    np.testing.assert_allclose(layer.mean[...], mean, rtol=1e-5)


def test_masked_values_do_not_matter():
    layer = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    x, mask = random(6, 3), jnp.arange(6)[:, None] < 4
    y = layer(x, mask=mask)
    changed = nnx.BatchNorm(3, rngs=nnx.Rngs(0))(x.at[4:].set(100.0), mask=mask)
    np.testing.assert_array_equal(y[:4], changed[:4])


def test_empty_mask_leaves_the_statistics_and_gives_no_nan():
    layer = nnx.BatchNorm(3, momentum=0.3, rngs=nnx.Rngs(0))
    x = random(6, 3)
    layer(x)
    mean, var = layer.mean[...], layer.var[...]
    expected = layer(x, use_running_average=True)
    np.testing.assert_array_equal(layer(x, mask=jnp.zeros((6, 1), bool)), expected)
    np.testing.assert_array_equal(layer.mean[...], mean)
    np.testing.assert_array_equal(layer.var[...], var)


def test_empty_mask_of_one_feature_concerns_that_feature():
    layer = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    mask = jnp.ones((6, 3), bool).at[:, 1].set(False)
    layer(random(6, 3), mask=mask)
    assert layer.mean[1] == 0
    assert (layer.mean[...][jnp.array([0, 2])] != 0).all()


def test_empty_mask_gives_finite_gradients():
    layer = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    mask = jnp.zeros((6, 1), bool)
    loss = lambda x: nnx.clone(layer)(x, mask=mask).sum()  # noqa: E731
    assert np.isfinite(jax.grad(loss)(random(6, 3))).all()


@pytest.mark.parametrize("layer", [nnx.BatchNorm, nnx.LayerNorm, nnx.RMSNorm])
@pytest.mark.parametrize("mask", [jnp.ones((6, 1)), jnp.ones((1, 6, 1), bool)])
def test_mask_must_be_boolean_and_fit(layer, mask):
    with pytest.raises(ValueError, match="mask must be boolean|roadcast"):
        layer(3, rngs=nnx.Rngs(0))(random(6, 3), mask=mask)


@pytest.mark.parametrize("fast", [True, False])
def test_statistics_are_averaged_over_a_named_axis(fast):
    whole = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    layer = nnx.BatchNorm(3, axis_name="b", use_fast_variance=fast, rngs=nnx.Rngs(0))
    x = random(4, 5, 3)

    def call(x):
        model = nnx.clone(layer)
        return model(x), model.mean[...], model.var[...]

    y, mean, var = jax.vmap(call, axis_name="b")(x)
    expected = whole(x.reshape(20, 3)).reshape(4, 5, 3)
    if not fast:  # Then the variance is within each part.
        expected = y
    np.testing.assert_allclose(y, expected, atol=1e-4)
    np.testing.assert_allclose(mean[2], whole.mean[...], rtol=1e-5)
    assert jnp.ptp(var, axis=0).max() == 0


def test_an_empty_part_of_a_named_axis_leaves_the_statistics():
    layer = nnx.BatchNorm(3, axis_name="b", rngs=nnx.Rngs(0))

    def call(x, mask):
        model = nnx.clone(layer)
        return model(x, mask=mask), model.mean[...]

    mask = jnp.ones((2, 5, 1), bool).at[1].set(False)
    y, mean = jax.vmap(call, axis_name="b")(random(2, 5, 3), mask)
    assert np.isfinite(y).all()
    np.testing.assert_array_equal(mean, jnp.zeros((2, 3)))


def test_statistics_are_promoted_for_evaluation_only():
    seen = []

    def promote(args, **kwargs):
        seen.append(([x if x is None else x.shape for x in args], kwargs))
        return args

    layer = nnx.BatchNorm(3, promote_dtype=promote, use_bias=False, rngs=nnx.Rngs(0))
    layer(random(4, 3))
    assert seen == [([(4, 3), (3,), (3,), (3,), None], {"dtype": None})]


# ------------------------------------------------------- LayerNorm and RMSNorm


@pytest.mark.parametrize("axes", [-1, (-1,), (1, 2), (-2, -1), 1])
@pytest.mark.parametrize("fast", [True, False])
def test_layer_norm_standardizes_over_the_reduction_axes(axes, fast):
    layer = nnx.LayerNorm(
        4, reduction_axes=axes, use_fast_variance=fast, rngs=nnx.Rngs(0)
    )
    x = random(5, 3, 4)
    expected = standardized(x, tuple(np.ravel(axes)), 1e-6)
    np.testing.assert_allclose(in_one_program(layer, x), expected, atol=1e-4)


def test_scale_and_bias_vary_along_the_feature_axes():
    layer = nnx.LayerNorm(12, feature_axes=(-1, 1), rngs=nnx.Rngs(0))
    x = random(5, 3, 2, 4)
    plain = np.asarray(in_one_program(layer, x))
    randomized(layer)
    scale = np.asarray(layer.scale[...]).reshape(1, 3, 1, 4)
    bias = np.asarray(layer.bias[...]).reshape(1, 3, 1, 4)
    np.testing.assert_allclose(
        in_one_program(layer, x), plain * scale + bias, rtol=1e-4, atol=1e-5
    )


def test_rms_norm_brings_the_mean_square_to_one():
    layer = nnx.RMSNorm(4, rngs=nnx.Rngs(0))
    x = random(5, 4)
    expected = np.float64(x) / np.sqrt((np.float64(x) ** 2).mean(-1, keepdims=True))
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5)


def test_rms_norm_takes_its_mask_by_position():
    layer = nnx.RMSNorm(4, rngs=nnx.Rngs(0))
    x, mask = random(5, 4), jnp.array([True, False, True, True])
    counted = np.float64(x)[:, [0, 2, 3]]
    expected = np.float64(x) / np.sqrt((counted**2).mean(-1, keepdims=True))
    np.testing.assert_allclose(layer(x, mask), expected, rtol=1e-5)
    with pytest.raises(TypeError):
        nnx.LayerNorm(4, rngs=nnx.Rngs(0))(x, mask)


def test_layer_norm_mask_selects_what_counts():
    layer = nnx.LayerNorm(4, reduction_axes=(1, 2), rngs=nnx.Rngs(0))
    x, mask = random(5, 3, 4), random_arrays.random_mask(5, 3, 1)
    mask = mask.at[:, 0].set(True)
    expected = standardized(x, (1, 2), 1e-6, mask)
    np.testing.assert_allclose(in_one_program(layer, x, mask=mask), expected, atol=1e-4)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_layer_norm_is_bit_equal_to_the_reference_formula(fast, dtype):
    layer = nnx.LayerNorm(
        8, use_fast_variance=fast, promote_dtype=identity, rngs=nnx.Rngs(0)
    )
    randomized(layer)
    x = random(6, 8).astype(dtype)
    scale, bias = layer.scale[...][None], layer.bias[...][None]
    expected = reference(x, (1,), 1e-6, scale, bias, fast)
    np.testing.assert_array_equal(layer(x), expected)


def test_rms_norm_is_bit_equal_to_the_reference_formula():
    layer = randomized(nnx.RMSNorm(8, promote_dtype=identity, rngs=nnx.Rngs(0)))
    x = random(6, 8)
    scale = layer.scale[...][None]
    expected = reference(x, (1,), 1e-6, scale, None, True, centered=False)
    np.testing.assert_array_equal(layer(x), expected)


def test_batch_norm_is_bit_equal_to_the_reference_formula():
    layer = randomized(nnx.BatchNorm(8, promote_dtype=identity, rngs=nnx.Rngs(0)))
    x = random(6, 8)
    mask = jnp.arange(6)[:, None] < 5
    scale, bias = layer.scale[...][None], layer.bias[...][None]
    expected = reference(x, (0,), 1e-5, scale, bias, True, mask=mask)
    np.testing.assert_array_equal(layer(x, mask=mask), expected)


def test_rngs_may_be_anything_if_nothing_is_drawn():
    layer = nnx.LayerNorm(4, use_scale=False, use_bias=False, rngs=None)
    assert layer.scale is None
    assert layer.bias is None
    assert layer(random(2, 4)).shape == (2, 4)
    with pytest.raises(TypeError, match="rngs"):
        nnx.LayerNorm(4, use_scale=False, use_bias=False)


@pytest.mark.parametrize("axis", [3, -4])
def test_axes_that_do_not_exist_are_refused(axis):
    with pytest.raises(ValueError, match="out of bounds"):
        nnx.LayerNorm(4, reduction_axes=axis, rngs=nnx.Rngs(0))(random(2, 3, 4))


NORMS = {
    "BatchNorm": nnx.BatchNorm,
    "LayerNorm": nnx.LayerNorm,
    "RMSNorm": nnx.RMSNorm,
    "InstanceNorm": nnx.InstanceNorm,
    "GroupNorm": functools.partial(nnx.GroupNorm, num_groups=2),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize(
    ("options", "inputs", "expected"),
    [
        ({}, jnp.bfloat16, jnp.float32),
        ({"param_dtype": jnp.bfloat16}, jnp.float32, jnp.float32),
        ({"dtype": jnp.float16}, jnp.float32, jnp.float16),
        ({"dtype": jnp.bfloat16}, jnp.int32, jnp.bfloat16),
        ({}, jnp.int32, jnp.float32),
        ({}, jnp.complex64, jnp.complex64),
    ],
)
def test_output_dtype(name, options, inputs, expected):
    layer = NORMS[name](4, **options, rngs=nnx.Rngs(0))
    x = random(2, 3, 4).astype(inputs)
    assert nnx.eval_shape(lambda layer: layer(x), layer).dtype == expected


@pytest.mark.parametrize("name", sorted(set(NORMS) - {"BatchNorm"}))
def test_half_params_give_half_outputs(name):
    layer = NORMS[name](4, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x = random(2, 3, 4, dtype=jnp.bfloat16)
    assert nnx.eval_shape(lambda layer: layer(x), layer).dtype == jnp.bfloat16


@pytest.mark.parametrize("name", NORMS)
def test_statistics_of_halves_are_computed_in_float32(name):
    layer = NORMS[name](4, dtype=jnp.float16, rngs=nnx.Rngs(0))
    # The squares of these don't fit into float16.
    x = jnp.asarray(np.tile([300.0, 500.0, 700.0, 900.0], (3, 1)), jnp.float32)
    assert np.isfinite(in_one_program(layer, x)).all()


@pytest.mark.parametrize("name", NORMS)
def test_integer_dtype_is_refused_at_the_call(name):
    layer = NORMS[name](4, dtype=jnp.int32, promote_dtype=identity, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="Dtype must be inexact"):
        layer(random(2, 3, 4))


GRID = [
    ({}, {}, "mask"),
    ({}, {"dtype": jnp.bfloat16}, None),
    ({}, {"param_dtype": jnp.bfloat16}, "mask"),
    ({"use_fast_variance": False}, {}, None),
    ({"use_fast_variance": False}, {"dtype": jnp.float16}, "mask"),
    ({"use_scale": False}, {"param_dtype": jnp.float16}, None),
]


@pytest.mark.peers
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize(("options", "dtypes", "mask"), GRID)
def test_normalization_equals_the_peer(peer, name, options, dtypes, mask):
    theirs = getattr(peer, name)
    if name == "GroupNorm":
        theirs = functools.partial(theirs, num_groups=2)
    ours = NORMS[name](4, **options, **dtypes, rngs=nnx.Rngs(0))
    theirs = theirs(4, **options, **dtypes, rngs=peer.Rngs(0))
    randomized(ours)
    randomized(theirs)
    if mask is not None:
        mask = random_arrays.random_mask(3, 6, 4)
        mask = mask.at[:, 0].set(True).at[..., 0].set(True)
    for dtype in (jnp.float32, jnp.bfloat16):
        x = random(3, 6, 4).astype(dtype)
        a, b = ours(x, mask=mask), theirs(x, mask=mask)
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=1e-5, atol=1e-5)
    if name == "BatchNorm":
        np.testing.assert_allclose(ours.mean[...], theirs.mean[...], rtol=1e-6)
        np.testing.assert_allclose(ours.var[...], theirs.var[...], rtol=1e-6)
        ours.eval(), theirs.eval()
        np.testing.assert_allclose(
            np.float32(ours(x)), np.float32(theirs(x)), rtol=1e-5
        )
