"""Layers in float64 against the formulas of their docstrings, in NumPy and SciPy.

Both sides compute in float64, so that they agree to twelve digits: no rounding can hide
a wrong constant, an axis too many or a statistic of too low precision.
"""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.signal

import graftree as nnx
from tests.programs import in_one_program

pytestmark = pytest.mark.usefixtures("float64")


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def make(name, *args, **options):
    """A layer whose Params are random float64."""
    options = {"param_dtype": jnp.float64, **options}
    layer = nnx.eval_shape(
        lambda: getattr(nnx, name)(*args, **options, rngs=nnx.Rngs(0))
    )
    for n, (_, variable) in enumerate(nnx.to_flat_state(nnx.state(layer))):
        values = random(*variable.shape, seed=n)
        if isinstance(variable, nnx.BatchStat):
            values = np.float32(np.abs(values))
        variable.set_value(jnp.asarray(values))
    return layer


def value(variable):
    return np.asarray(variable[...])


def agree(actual, expected):
    assert actual.dtype == jnp.float64
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)


# ----------------------------------------------------------------------- contractions


def test_linear_is_a_matrix_product_plus_bias():
    layer, x = make("Linear", 3, 4), random(2, 5, 3)
    agree(layer(x), x @ value(layer.kernel) + value(layer.bias))


def test_linear_general_contracts_axes_and_varies_along_batch_axes():
    layer = make("LinearGeneral", (4, 3), (2, 6), axis=(-1, 2), batch_axis={0: 5})
    x = random(5, 7, 4, 3)
    y = np.einsum("ntab,nabcd->ntcd", x, value(layer.kernel))
    agree(layer(x), y + value(layer.bias)[:, None])


def test_einsum_adds_its_bias_along_the_letters_of_the_kernel():
    layer = make("Einsum", "nta,hab->nbht", (6, 3, 4), (4, 6))
    x = random(2, 5, 3)
    y = np.einsum("nta,hab->nbht", x, value(layer.kernel))
    agree(layer(x), y + value(layer.bias)[None, :, :, None])


def test_embed_multiplies_with_its_rows():
    layer, query = make("Embed", 7, 3), random(2, 3)
    agree(layer.attend(query), query @ value(layer.embedding).T)
    agree(layer(jnp.array([[6, 0]])), value(layer.embedding)[[[6, 0]]])


# ------------------------------------------------------------------------ convolutions


def correlate(x, kernel):
    """The part of a correlation where the kernel lies within ``x``, by SciPy."""
    x, kernel = np.moveaxis(x, -1, 0), np.moveaxis(kernel, (-2, -1), (0, 1))
    y = [
        sum(map(lambda a, b: scipy.signal.correlate(a, b, "valid"), x, kernel[:, o]))
        for o in range(kernel.shape[1])
    ]
    return np.moveaxis(np.stack(y), 0, -1)


def spread(x, steps):
    """The array with zeros between the entries of its first axes."""
    shape = [(n - 1) * d + 1 for n, d in zip(x.shape, steps, strict=False)]
    y = np.zeros((*shape, *x.shape[len(steps) :]))
    y[tuple(slice(None, None, d) for d in steps)] = x
    return y


# Kernel size, strides, dilation of the kernel, dilation of the inputs, groups.
SIZES = [
    ((3,), (1,), (1,), (1,), 1),
    ((2,), (3,), (2,), (2,), 2),
    ((3, 2), (2, 1), (1, 2), (1, 3), 1),
    ((2, 2, 2), (1, 2, 1), (2, 1, 1), (1, 1, 1), 2),
]


@pytest.mark.parametrize("pads", [(0, 0), (2, 1)])
@pytest.mark.parametrize("sizes", SIZES)
def test_conv_is_the_correlation_of_scipy(sizes, pads):
    kernel_size, strides, kernel_dilation, input_dilation, groups = sizes
    rank = len(kernel_size)
    layer = make(
        "Conv",
        4,
        6,
        kernel_size,
        strides,
        padding=(pads,) * rank,
        kernel_dilation=kernel_dilation,
        input_dilation=input_dilation,
        feature_group_count=groups,
    )
    x = random(*(7, 6, 5)[:rank], 4)
    padded = np.pad(spread(x, input_dilation), [pads] * rank + [(0, 0)])
    kernel = spread(value(layer.kernel), kernel_dilation)
    channels, kernels = (np.split(a, groups, -1) for a in (padded, kernel))
    y = np.concatenate(list(map(correlate, channels, kernels)), -1)
    y = y[tuple(slice(None, None, s) for s in strides)]
    agree(in_one_program(layer, x[None]), y[None] + value(layer.bias))


@pytest.mark.parametrize("pads", [(0, 0), (1, 1), (3, 1)])
@pytest.mark.parametrize("stride", [1, 2])
def test_conv_transpose_is_the_transpose_of_the_correlation(stride, pads):
    size, length = 4, 10  # strides divide the length evenly
    padding = [tuple(size - 1 - pad for pad in pads)]
    options = {"padding": padding, "transpose_kernel": True, "use_bias": False}
    layer = make("ConvTranspose", 3, 2, size, stride, **options)
    kernel = value(layer.kernel)

    def correlation(x):
        return correlate(np.pad(x, [pads, (0, 0)]), kernel)[::stride]

    basis = np.eye(length * 2).reshape(-1, length, 2)
    matrix = np.stack([correlation(x).ravel() for x in basis])
    y = random(*correlation(basis[0]).shape)
    agree(in_one_program(layer, y[None]), (matrix @ y.ravel()).reshape(1, length, 2))


# --------------------------------------------------------------------------- statistics


def standardized(x, axes, epsilon, where=True):
    where = np.broadcast_to(where, x.shape)
    mean = x.mean(axes, keepdims=True, where=where)
    variance = x.var(axes, keepdims=True, where=where)
    return (x - mean) / np.sqrt(variance + epsilon)


def affine(layer, y):
    return y * value(layer.scale) + value(layer.bias)


# Name, arguments, the axes that are reduced, epsilon.
NORMS = [
    ("BatchNorm", (6,), {}, (0, 1, 2), 1e-5),
    ("LayerNorm", (6,), {}, (3,), 1e-6),
    ("LayerNorm", (6,), {"reduction_axes": (1, -1), "epsilon": 0.1}, (1, 3), 0.1),
    ("InstanceNorm", (6,), {}, (1, 2), 1e-6),
]


@pytest.mark.parametrize("is_masked", [True, False])
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("name", "args", "options", "axes", "epsilon"), NORMS)
def test_norms_standardize_scale_and_shift(
    name, args, options, axes, epsilon, fast, is_masked
):
    layer = make(name, *args, use_fast_variance=fast, **options)
    x = 3 + random(4, 5, 2, 6)
    mask = random(4, 5, 2, 6, seed=1) > -0.5
    mask[:, 0] = mask[..., 0] = True  # something counts everywhere
    y = standardized(x, axes, epsilon, mask if is_masked else True)
    actual = in_one_program(layer, x, mask=mask if is_masked else None)
    agree(actual, affine(layer, y))


def test_group_norm_standardizes_groups():
    layer, x = make("GroupNorm", 6, 3), 3 + random(4, 5, 6)
    y = standardized(x.reshape(4, 5, 3, 2), (1, 3), 1e-6).reshape(x.shape)
    agree(in_one_program(layer, x), affine(layer, y))


def test_rms_norm_divides_by_the_root_of_the_mean_square():
    layer, x = make("RMSNorm", 6), 3 + random(4, 6)
    y = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6)
    agree(layer(x), y * value(layer.scale))


def test_running_statistics_move_by_the_momentum():
    layer, x = make("BatchNorm", 6, momentum=0.75), 3 + random(8, 6)
    mean, var = value(layer.mean), value(layer.var)
    in_one_program(layer, x)
    # These are stored in float32, whatever the inputs are.
    assert layer.mean.dtype == layer.var.dtype == jnp.float32
    rounding = {"rtol": 1e-7}
    np.testing.assert_allclose(
        layer.mean[...], 0.75 * mean + 0.25 * x.mean(0), **rounding
    )
    np.testing.assert_allclose(layer.var[...], 0.75 * var + 0.25 * x.var(0), **rounding)


def test_evaluation_uses_the_running_statistics():
    layer, x = make("BatchNorm", 6, use_running_average=True), random(8, 6)
    mean, var = np.float64(value(layer.mean)), np.float64(value(layer.var))
    agree(in_one_program(layer, x), affine(layer, (x - mean) / np.sqrt(var + 1e-5)))


def test_statistics_of_complex_numbers():
    layer = make("LayerNorm", 6, use_scale=False, use_bias=False)
    x = random(4, 6) + 1j * random(4, 6, seed=1)
    actual = in_one_program(layer, x)
    assert actual.dtype == jnp.complex128
    np.testing.assert_allclose(actual, standardized(x, (1,), 1e-6), rtol=1e-12)
