"""Normalization layers: order of operations, statistics, masks, named axes, groups.

Their formulas in float64 are in `test_formulas.py`, their dtypes in `test_dtypes.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import catalog, random_arrays, tables
from tests.programs import in_one_program

random = functools.partial(random_arrays.random, mean=3, scale=2)


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
        param[...] = random(8, seed=n)
    x, axes, epsilon, options = random(6, 8).astype(dtype), (1,), 1e-6, {}
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
    x = 1e4 + random(1, 1000, mean=0)
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

    make("BatchNorm", 3, promote_dtype=promote, use_bias=False)(random(4, 3))
    assert seen == [([(4, 3), (3,), (3,), (3,), None], {"dtype": None})]


def test_batch_norm_can_be_closed_over_if_it_only_evaluates():
    layer = make("BatchNorm", 3)
    layer.eval()
    assert jax.jit(lambda x: layer(x))(random(4, 3)).shape == (4, 3)


def test_no_gradient_flows_into_the_stored_statistics():
    layer = make("BatchNorm", 3)

    @jax.jit
    @jax.grad
    def gradient(x):
        model = nnx.clone(layer)
        model(x)
        return model.mean[...].sum() + model.var[...].sum()

    np.testing.assert_array_equal(gradient(random(4, 3)), np.zeros((4, 3)))


def test_ref_backed_statistics_move_inside_plain_grad():
    layer = make("BatchNorm", 3, momentum=0.5)
    graphdef, params, statistics = nnx.split(layer, nnx.Param, nnx.BatchStat)
    statistics, x = nnx.to_refs(statistics), random(8, 3)

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
    x = random(2, 6, 3)
    in_one_program(layer, x, mask=jnp.arange(6)[:, None] < 4)
    counted = np.float64(x)[:, :4]
    np.testing.assert_allclose(layer.mean[...], 0.5 * counted.mean((0, 1)), rtol=1e-5)
    variance = 0.5 + 0.5 * counted.var((0, 1))
    np.testing.assert_allclose(layer.var[...], variance, rtol=1e-5)


def test_empty_mask_leaves_the_statistics_and_gives_no_nan():
    layer, x = make("BatchNorm", 3, momentum=0.3), random(6, 3)
    empty = jnp.zeros((6, 1), bool)
    layer(x)
    before = catalog.state_of(layer)
    expected = layer(x, use_running_average=True)
    np.testing.assert_array_equal(layer(x, mask=empty), expected)
    jax.tree.map(np.testing.assert_array_equal, catalog.state_of(layer), before)
    loss = lambda x: nnx.clone(layer)(x, mask=empty).sum()  # noqa: E731
    assert np.isfinite(jax.jit(jax.grad(loss))(x)).all()


def test_empty_mask_of_one_feature_concerns_that_feature():
    layer = make("BatchNorm", 3)
    layer(random(6, 3), mask=jnp.ones((6, 3), bool).at[:, 1].set(False))
    assert [bool(mean) for mean in layer.mean[...]] == [True, False, True]


def test_rms_norm_takes_its_mask_by_position_as_a_list_too():
    layer = make("RMSNorm", 4)
    x, mask = random(5, 4), [True, False, True, True]
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
    x = random(4, 5, 3)

    def call(x):
        model = nnx.clone(layer)
        return model(x), model.mean[...], model.var[...]

    y, mean, var = jax.jit(jax.vmap(call, axis_name="b"))(x)
    expected = np.reshape(in_one_program(whole, np.reshape(x, (20, 3))), (4, 5, 3))
    np.testing.assert_allclose(y, expected, atol=1e-4)
    for found, of_all in ((mean, whole.mean), (var, whole.var)):
        np.testing.assert_allclose(found, np.tile(of_all[...], (4, 1)), rtol=1e-4)


def test_an_empty_part_of_a_named_axis_leaves_the_statistics():
    layer = make("BatchNorm", 3, axis_name="b")

    def call(x, mask):
        model = nnx.clone(layer)
        return model(x, mask=mask), model.mean[...]

    mask = jnp.ones((2, 5, 1), bool).at[1].set(False)
    y, mean = jax.jit(jax.vmap(call, axis_name="b"))(random(2, 5, 3), mask)
    assert np.isfinite(y).all()
    np.testing.assert_array_equal(mean, np.zeros((2, 3)))


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
        make(name, *args, **options)(random(2, 3, 4))


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
