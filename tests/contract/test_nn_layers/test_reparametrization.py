"""Spectral and weight normalization: formulas in float64, state, failures, the peer."""

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest

import graftree as nnx
from tests import catalog, tables
from tests.comparisons import raises, unchanged
from tests.programs import in_one_program

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(2, 2, 3)
HALF = jnp.bfloat16


def linear(**options):
    return nnx.Linear(3, 4, **options, rngs=nnx.Rngs(0))


def two_layers(library=nnx):
    last = library.Linear(4, 2, rngs=library.Rngs(1))
    return library.Sequential(library.Linear(3, 4, rngs=library.Rngs(0)), last)


def spectral(layer=None, **options):
    return nnx.SpectralNorm(layer or linear(), **options, rngs=nnx.Rngs(7))


def weight(layer=None, **options):
    return nnx.WeightNorm(layer or linear(), **options, rngs=nnx.Rngs(7))


both = pytest.mark.parametrize("wrap", [spectral, weight])


def kernel_of(model):
    return model.layer_instance.kernel


# ------------------------------------------------------------------------ SpectralNorm


def power_iteration(weights, u, steps, epsilon=1e-12):
    """The formula, in NumPy: new weights, u and sigma."""
    matrix = weights.reshape(-1, weights.shape[-1])
    for _ in range(steps):
        v = u @ matrix.T
        v /= np.sqrt((v**2).sum() + epsilon)
        u = v @ matrix
        u /= np.sqrt((u**2).sum() + epsilon)
    sigma = (v @ matrix @ u.T)[0, 0]
    return weights / sigma, u, sigma


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("layer", ["Linear", "Conv"])
def test_spectral_norm_is_one_power_iteration_per_call(layer, steps):
    inner = linear() if layer == "Linear" else nnx.Conv(3, 4, 2, rngs=nnx.Rngs(0))
    model = spectral(inner, n_steps=steps)
    stats = model.batch_stats
    weights = np.float64(inner.kernel[...])
    u = np.float64(stats["kernel", "u"][...])
    for _ in range(3):
        weights, u, sigma = power_iteration(weights, u, steps)
        np.testing.assert_array_equal(model(X), inner(X))
        np.testing.assert_allclose(inner.kernel[...], weights, rtol=1e-4)
        np.testing.assert_allclose(stats["kernel", "u"][...], u, rtol=1e-4)
        np.testing.assert_allclose(stats["kernel", "sigma"][...], sigma, rtol=1e-4)


def test_statistics_have_the_paths_of_matrices_only():
    model = spectral(two_layers())
    paths = [("layers", i, "kernel", name) for i in (0, 1) for name in ("u", "sigma")]
    assert list(model.batch_stats) == paths
    flat = nnx.to_flat_state(nnx.state(model, nnx.BatchStat))
    assert {path for path, _ in flat} == {("batch_stats", path) for path in paths}
    assert [model.batch_stats[path].shape for path in paths] == [(1, 4), (), (1, 2), ()]


def test_one_key_is_drawn_per_matrix():
    rngs = nnx.Rngs(params=3)
    model = nnx.SpectralNorm(two_layers(), rngs=rngs)
    assert rngs.params.count[...] == 2
    second = jax.random.fold_in(jax.random.key(3), 1)
    expected = nnx.initializers.normal(0.01)(second, (1, 2), jnp.float32)
    u = model.batch_stats["layers", 1, "kernel", "u"]
    np.testing.assert_array_equal(u[...], expected)


def test_without_steps_nothing_happens():
    rngs = nnx.Rngs(0)
    model = nnx.SpectralNorm(linear(), n_steps=0, rngs=rngs)
    assert (model.batch_stats, rngs.default.count[...]) == ({}, 0)
    np.testing.assert_array_equal(model(X), linear()(X))


@pytest.mark.parametrize("by", ["argument", "constructor", "eval"])
def test_without_update_the_statistics_stay_and_weights_are_written(by):
    model = spectral(update_stats=by != "constructor")
    if by == "eval":
        model.eval()
    before = catalog.state_of(model)
    model(X, **({"update_stats": False} if by == "argument" else {}))
    after = catalog.state_of(model)
    changed = [p for p in before if (before[p] != after[p]).any()]
    assert changed == [("layer_instance", "kernel")]
    model.train()
    model(X)
    u = before["batch_stats", ("kernel", "u")]
    assert (model.batch_stats["kernel", "u"][...] != u).any()


def test_zero_matrix_stays_zero():
    model = spectral()
    kernel_of(model)[...] = jnp.zeros((3, 4))
    grads = nnx.jit(nnx.grad(lambda m: m(X).sum()))(model)
    assert np.isfinite(grads.layer_instance.kernel[...]).all()
    np.testing.assert_array_equal(kernel_of(model)[...], 0.0)
    assert model.batch_stats["kernel", "sigma"][...] == 0.0


@tables.cases(
    "param_dtype, stats_dtype, dtype",
    (HALF, jnp.float32, None),
    (HALF, HALF, None),
    (jnp.float16, jnp.float16, jnp.float32),
    (jnp.float32, HALF, None),
    (jnp.float32, jnp.float32, HALF),
)
def test_weights_and_statistics_keep_their_dtype(param_dtype, stats_dtype, dtype):
    layer = linear(param_dtype=param_dtype)
    weights = np.float64(layer.kernel[...])
    model = spectral(layer, dtype=dtype, param_dtype=stats_dtype)
    u = np.float64(model.batch_stats["kernel", "u"][...])
    assert in_one_program(model, X).shape == (2, 2, 4)
    assert layer.kernel.dtype == param_dtype
    assert model.batch_stats["kernel", "u"].dtype == stats_dtype
    assert model.batch_stats["kernel", "sigma"].dtype == stats_dtype
    expected = power_iteration(weights, u, 1)[0]
    np.testing.assert_allclose(np.float64(layer.kernel[...]), expected, rtol=1e-2)


@pytest.mark.usefixtures("float64")
def test_gradient_of_spectral_norm_equals_finite_differences():
    # At the singular vectors the value is stationary in u and v, which the gradient
    # takes for constants.
    layer = linear(param_dtype=jnp.float64)
    layer.kernel[...] = layer.kernel[...].at[0, 0].set(30.0)  # for fast convergence
    model = spectral(layer, n_steps=6, param_dtype=jnp.float64)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def loss(params):
        return jnp.sin(nnx.merge(graphdef, params, rest, copy=True)(X)).sum()

    jax.test_util.check_grads(loss, (params,), order=1, modes=["rev"])


def test_no_derivative_reaches_the_statistics():
    grads = jax.jit(jax.grad(lambda m: (m(X) ** 2).sum()))(spectral())
    for stat in grads.batch_stats.values():
        np.testing.assert_array_equal(stat[...], 0.0)


def test_more_axes_are_an_error_if_asked():
    rngs = nnx.Rngs(0)
    conv = nnx.Conv(3, 4, (2,), rngs=nnx.Rngs(0))
    message = "('kernel',) [2,3,4]", "3D but error_on_non_matrix is True"
    with raises(ValueError, *message):
        nnx.SpectralNorm(conv, error_on_non_matrix=True, rngs=rngs)
    assert rngs.default.count[...] == 0


# -------------------------------------------------------------------------- WeightNorm


@tables.cases(
    "axes, shape",
    (-1, (4,)),
    (0, (2,)),
    ((0, -1), (2, 4)),
    ([1], (3,)),
    (None, ()),
    ((), ()),
    ((0, 1, 2), (2, 3, 4)),
)
@pytest.mark.parametrize("use_scale", [True, False])
def test_weight_norm_normalizes_over_all_but_the_feature_axes(axes, shape, use_scale):
    layer = nnx.Conv(3, 4, (2,), rngs=nnx.Rngs(0))
    old = np.float64(layer.kernel[...])
    model = weight(layer, feature_axes=axes, use_scale=use_scale)
    features = () if axes is None else np.atleast_1d(np.array(axes, int)) % 3
    others = tuple(axis for axis in range(3) if axis not in features)
    expected = old / np.sqrt((old**2).sum(others, keepdims=True) + 1e-12)
    if use_scale:
        scale = jnp.linspace(1.0, 2.0, np.prod(shape, dtype=int)).reshape(shape)
        model.scales["kernel",][...] = scale
        sizes = [n if axis in features else 1 for axis, n in enumerate(old.shape)]
        expected = expected * np.float64(scale).reshape(sizes)
    y = model(X)
    np.testing.assert_allclose(layer.kernel[...], expected, rtol=1e-5)
    np.testing.assert_array_equal(y, layer(X))


def test_scales_are_ones_and_params_with_the_paths_of_kernels():
    rngs = nnx.Rngs(0)
    model = nnx.WeightNorm(two_layers(), rngs=rngs)
    assert list(model.scales) == [("layers", 0, "kernel"), ("layers", 1, "kernel")]
    for scale, size in zip(model.scales.values(), (4, 2), strict=True):
        np.testing.assert_array_equal(scale[...], np.ones(size, np.float32))
        assert scale.dtype == jnp.float32
    params = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    assert ("scales", ("layers", 0, "kernel")) in params
    assert rngs.default.count[...] == 0


def test_without_scale_there_are_none_and_rngs_need_not_be_valid():
    model = nnx.WeightNorm(linear(), use_scale=False, rngs=None)
    assert model.scales is None
    norms = jnp.linalg.norm(model(jnp.eye(3)), axis=0)
    np.testing.assert_allclose(norms, 1.0, rtol=1e-6)
    model.scales = {("kernel",): nnx.Param(jnp.full(4, 2.0))}
    model.use_scale = True
    np.testing.assert_allclose(jnp.linalg.norm(model(jnp.eye(3)), axis=0), 2.0)


def test_random_scales_differ_by_path_and_leave_the_counts():
    rngs = nnx.Rngs(5)
    normal = nnx.initializers.normal()

    def scales():
        layers = nnx.Sequential(linear(), nnx.Linear(4, 4, rngs=nnx.Rngs(1)))
        model = nnx.WeightNorm(layers, scale_init=normal, rngs=rngs)
        return [scale[...] for scale in model.scales.values()]

    first, second = scales()
    assert (first != second).all() and rngs.default.count[...] == 0
    np.testing.assert_array_equal(first, scales()[0])
    rngs.params()
    assert (first != scales()[0]).all()


def test_random_scales_share_no_key_with_later_draws():
    rngs = nnx.Rngs(5)
    keys = []

    def init(key, shape, dtype):
        keys.append(jax.random.key_data(key))
        return jnp.ones(shape, dtype)

    nnx.WeightNorm(two_layers(), scale_init=init, rngs=rngs)
    fork = rngs.params.fork()
    later = [rngs.params() for _ in range(3)] + [fork() for _ in range(3)]
    keys += [jax.random.key_data(key) for key in later]
    assert len({tuple(map(int, key)) for key in keys}) == 8


def test_variable_filter_chooses_what_is_normalized():
    model = weight(variable_filter=nnx.PathContains("bias"), feature_axes=None)
    bias, kernel = model.layer_instance.bias, kernel_of(model)[...]
    bias[...] = jnp.array([3.0, 0.0, 4.0, 0.0])
    model(X)
    np.testing.assert_allclose(bias[...], [0.6, 0.0, 0.8, 0.0], rtol=1e-6)
    np.testing.assert_array_equal(kernel_of(model)[...], kernel)
    assert weight(variable_filter="bias").variable_filter == nnx.WithTag("bias")


@tables.cases(
    "param_dtype, options, expected",
    (jnp.float32, {}, jnp.float32),
    (HALF, {}, HALF),
    (jnp.float16, {}, jnp.float16),
    (HALF, {"param_dtype": HALF}, HALF),
    (HALF, {"use_scale": False}, HALF),
    (jnp.float32, {"dtype": HALF}, HALF),
    (HALF, {"dtype": jnp.float32}, jnp.float32),
)
def test_weights_keep_their_dtype_unless_told_otherwise(param_dtype, options, expected):
    layer = linear(param_dtype=param_dtype)
    old = np.float64(layer.kernel[...])
    model = weight(layer, **options)
    for _ in range(2):
        model(X)
        assert layer.kernel.dtype == expected
    new = old / np.linalg.norm(old, axis=0, keepdims=True)
    np.testing.assert_allclose(np.float64(layer.kernel[...]), new, rtol=2e-2)
    if model.scales:
        assert model.scales["kernel",].dtype == options.get("param_dtype", jnp.float32)


def test_ref_backed_weights_keep_their_dtype():
    model = nnx.to_refs(weight(dtype=HALF))
    jax.jit(lambda m, x: m(x))(model, X)
    assert kernel_of(model).dtype == jnp.float32
    norms = jnp.linalg.norm(kernel_of(model)[...], axis=0)
    np.testing.assert_allclose(norms, 1.0, rtol=1e-2)


def test_promotion_hook_gets_the_new_weights():
    seen = []

    def promote(args, **options):
        seen.append((args[0].shape, options))
        return tuple(jnp.round(x) for x in args)

    model = weight(promote_dtype=promote)
    model(X)
    assert seen == [((3, 4), {"dtype": None})]
    assert set(np.unique(kernel_of(model)[...])) <= {-1.0, 0.0, 1.0}


def test_feature_axis_that_does_not_exist_is_refused():
    with pytest.raises((ValueError, IndexError), match="axis 5"):
        weight(feature_axes=5)


@pytest.mark.parametrize("rngs", [0, None, jax.random.key(0), nnx.Rngs(dropout=0)])
@pytest.mark.parametrize("cls", [nnx.SpectralNorm, nnx.WeightNorm])
def test_rngs_must_have_a_stream_for_params(cls, rngs):
    with pytest.raises(AttributeError, match="params"):
        cls(linear(), rngs=rngs)


# -------------------------------------------------------------------------------- both


class Affine(nnx.Module):
    """Has a kernel with norms of one, and arguments of its own."""

    def __init__(self):
        self.kernel = nnx.Param(jnp.eye(3))

    def __call__(self, x, factor=1.0, *, offset):
        return factor * x @ self.kernel[...] + offset


def test_further_arguments_reach_the_layer():
    y = spectral(Affine(), n_steps=30)(X, factor=2.0, offset=1.0)
    np.testing.assert_allclose(y, 2.0 * X + 1.0, rtol=1e-5)
    np.testing.assert_allclose(weight(Affine())(X, 2.0, offset=1.0), 2.0 * X + 1.0)


@both
def test_new_parameters_are_refused_before_anything_is_written(wrap):
    model = wrap(two_layers())
    model.layer_instance.layers.append(linear())
    phrase = "Parameters of the layer_instance should not change(.|\n)*'layers', 2"
    with unchanged(model), pytest.raises(RuntimeError, match=phrase):
        model(X)


@both
def test_failed_call_of_the_layer_changes_nothing(wrap, mode):
    model = wrap(two_layers())
    for call in (type(model).__call__, nnx.jit(lambda m, x: m(x), **mode)):
        with unchanged(model), pytest.raises(TypeError, match="contracting dimensions"):
            call(model, jnp.ones((1, 5)))


class Doubled(nnx.Param):
    """Shows twice what it holds."""

    def get_value(self, **options):
        return 2 * super().get_value(**options)


@both
@pytest.mark.parametrize("kind", ["ref", "with a hook"])
def test_failed_call_gives_back_what_was_stored(wrap, kind):
    model = wrap()
    if kind == "ref":
        model = nnx.to_refs(model)
    else:
        model.layer_instance.kernel = Doubled(kernel_of(model)[...])

    def stored():
        return np.asarray(kernel_of(model).get_raw_value()[...])

    before = stored()
    with pytest.raises(TypeError, match="contracting dimensions"):
        model(jnp.ones((1, 5)))
    np.testing.assert_array_equal(stored(), before)


@both
def test_errors_of_those_who_may_not_write_pass_through(wrap):
    model = nnx.to_refs(wrap())
    with unchanged(model), pytest.raises(TypeError, match="contracting dimensions"):
        jax.eval_shape(lambda x: model(x), jnp.ones((1, 5)))


def test_what_can_fail_reads_no_ref_once_more():
    model = nnx.to_refs(weight())
    program = str(jax.make_jaxpr(lambda m, x: m(x))(model, X))
    # Kernel and scale, for the new weights; kernel and bias, in the layer.
    assert program.count("<- ") - program.count("[...] <- ") <= 4, program


@both
def test_weights_of_another_trace_are_left_alone(wrap):
    model, error = wrap(), nnx.errors.TraceContextError
    with unchanged(model), pytest.raises(error, match="Cannot mutate"):
        jax.jit(lambda x: model(x))(X)


@both
def test_frozen_weights_are_normalized_like_others(wrap):
    frozen = linear()
    nnx.surgery.freeze(frozen)
    model, expected = wrap(frozen), wrap()
    np.testing.assert_array_equal(model(X), expected(X))
    np.testing.assert_array_equal(kernel_of(model)[...], kernel_of(expected)[...])


@both
def test_a_stack_is_refused_and_its_layers_may_be_wrapped(wrap):
    def square(rngs):
        return nnx.Linear(3, 3, rngs=rngs)

    stack = nnx.Stack(square, 2, rngs=nnx.Rngs(0))
    told = r"can't wrap a Stack(?s:.*)layer_instance\.a(?s:.*)Wrap each layer"
    with pytest.raises(ValueError, match=told):
        wrap(nnx.Dict(a=stack))
    stack = nnx.Stack(lambda rngs: wrap(square(rngs)), 2, rngs=nnx.Rngs(0))
    x, rngs = X, nnx.Rngs(0)
    for layer in [wrap(square(rngs)) for _ in range(2)]:
        x = layer(x)
    np.testing.assert_allclose(stack(X), x, rtol=1e-5, atol=1e-6)
