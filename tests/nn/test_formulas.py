"""Layers in float64 against the formulas of their docstrings, in NumPy and SciPy.

Both sides compute in float64, so that they agree to twelve digits: no rounding can hide
a wrong constant, an axis too many or a statistic of too low precision. A formula is
one test over a table of sizes and options. Those of attention, of cells and of layers
around layers are in the files of these.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.signal

import graftree as nnx
from tests import tables
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


def agree(actual, expected, tolerance=1e-12):
    assert actual.dtype == jnp.float64 and actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


# ----------------------------------------------------------------------- contractions

# Equation, shapes of inputs, kernel and bias, and that in which the bias is added.
EINSUM = [
    ("ab,bc->ac", (2, 3), (3, 4), (4,), (4,)),
    ("ab,bc->ca", (2, 3), (3, 4), (4,), (4, 1)),
    ("a b, b c -> a c", (2, 3), (3, 4), 4, (4,)),
    ("nta,hab->nthb", (2, 5, 3), (6, 3, 4), (6, 4), (6, 4)),
    ("nta,hab->nbht", (2, 5, 3), (6, 3, 4), (4, 6), (4, 6, 1)),
    ("hab,ha->hb", (6, 3, 4), (6, 3), (6,), (6, 1)),
    ("...b,bc->...c", (2, 5, 3), (3, 4), (4,), (4,)),
    ("...b,bc->c...", (2, 5, 3), (3, 4), (4,), (4, 1, 1)),
    ("d...ab,bc...->ad...c", (7, 5, 2, 3), (3, 4, 5), (5, 4), (5, 4)),
    ("...b,...bc->...c", (2, 5, 3), (5, 3, 4), (5, 4), (5, 4)),
]
# Arguments, options, shape of the inputs, equation, shape in which the bias is added.
GENERAL = [
    ((2, 4), {}, (3, 2), "na,ab->nb", (4,)),
    *(
        (((2, 3), (4, 5)), {"axis": axis}, (7, 2, 3), "nab,abcd->ncd", (4, 5))
        for axis in [(-2, -1), (1, 2), (-1, -2), (2, -2)]
    ),
    (((7, 3), 4), {"axis": (0, 2)}, (7, 2, 3), "nab,nbc->ac", (4,)),
    (
        (3, (4, 5)),
        {"axis": -1, "batch_axis": {0: 7, 1: 2}},
        (7, 2, 6, 3),
        "nmta,nmacd->nmtcd",
        (7, 2, 1, 4, 5),
    ),
    (
        ((4, 3), (2, 6)),
        {"axis": (-1, 2), "batch_axis": {0: 5}},
        (5, 7, 4, 3),
        "ntab,nabcd->ntcd",
        (5, 1, 2, 6),
    ),
]
# The name, and what GENERAL has.
CONTRACTIONS = [
    *(
        ("Linear", (3, 4), {}, (*batch, 3), "...a,ab->...b", (4,))
        for batch in [(), (5,), (2, 0), (2, 3, 4)]
    ),
    *(("LinearGeneral", *row) for row in GENERAL),
    *(
        ("Einsum", (equation, kernel, bias), {}, shape, equation, spread)
        for equation, shape, kernel, bias, spread in EINSUM
    ),
]


@tables.cases("name, args, options, shape, equation, spread", *CONTRACTIONS)
def test_contraction_is_product_plus_bias(name, args, options, shape, equation, spread):
    layer, x = make(name, *args, **options), random(*shape)
    expected = np.einsum(equation, x, value(layer.kernel))
    agree(in_one_program(layer, x), expected + value(layer.bias).reshape(spread))


def test_embed_multiplies_with_its_rows():
    layer, query = make("Embed", 7, 3), random(2, 4, 3)
    agree(in_one_program(layer.attend, query), query @ value(layer.embedding).T)
    agree(layer(jnp.array([[6, 0]])), value(layer.embedding)[[[6, 0]]])


@pytest.mark.parametrize("batch", [(), (5,), (2, 0), (2, 3, 4)])
def test_lora_is_added_to_its_base(batch):
    linear = make("LoRALinear", 3, 4, lora_rank=2, lora_param_dtype=jnp.float64)
    layer = linear.lora
    x = random(*batch, 3)
    change = x @ value(layer.lora_a) @ value(layer.lora_b)
    base = x @ value(linear.kernel) + value(linear.bias)
    agree(in_one_program(linear, x), base + change)
    agree(in_one_program(layer, x), change)
    layer.base_module = make("Linear", 3, 4)
    base = value(layer.base_module(x))
    agree(in_one_program(layer, x), base + change)


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


def padded(x, padding, kernel, strides):
    """The inputs with what the padding of this name adds, for a dilated kernel."""
    modes = {"CIRCULAR": "wrap", "REFLECT": "reflect"}
    widths = []
    for n, span, step in zip(x.shape, kernel.shape, strides, strict=False):
        total = max((-(-n // step) - 1) * step + span - n, 0)
        named = {
            "VALID": (0, 0),
            "SAME": (total // 2, total - total // 2),
            "SAME_LOWER": (total - total // 2, total // 2),
            "CIRCULAR": ((span - 1) // 2, span // 2),
            "REFLECT": ((span - 1) // 2, span // 2),
            "CAUSAL": (span - 1, 0),
        }
        widths.append(named.get(padding, padding))
    return np.pad(x, [*widths, (0, 0)], mode=modes.get(padding, "constant"))


# Padding, kernel size, strides, dilation of the kernel, of the inputs, groups.
SIZES = [
    ((3,), (1,), (1,), (1,), 1),
    ((4,), (2,), (1,), (1,), 1),
    ((3,), (1,), (2,), (1,), 2),
    ((2,), (2,), (2,), (2,), 2),
]
NAMES = ["SAME", "SAME_LOWER", "VALID", "CIRCULAR", "REFLECT", "CAUSAL"]
CONVOLUTIONS = [
    *((padding, *sizes) for padding in NAMES for sizes in SIZES),
    ("SAME", (3, 2), (2, 1), (1, 2), (1, 1), 2),
    ("SAME", (3,), (3,), (1,), (2,), 1),
    ("CIRCULAR", (3, 4), (1, 1), (2, 1), (1, 3), 1),
    ("REFLECT", (2, 3), (1, 2), (1, 1), (2, 2), 2),
    ("VALID", (2, 2, 2), (1, 1, 1), (1, 2, 1), (1, 1, 1), 1),
    ((2, 1), (2,), (3,), (2,), (2,), 2),
    ((2, 1), (3, 2), (2, 1), (1, 2), (1, 3), 1),
    ((2, 1), (2, 2, 2), (1, 2, 1), (2, 1, 1), (1, 1, 1), 2),
]


@pytest.mark.parametrize(
    ("padding", "size", "strides", "kernel_dilation", "input_dilation", "groups"),
    CONVOLUTIONS,
)
def test_conv_is_the_correlation_of_scipy(
    padding, size, strides, kernel_dilation, input_dilation, groups
):
    options = {
        "padding": padding if isinstance(padding, str) else (padding,) * len(size),
        "kernel_dilation": kernel_dilation,
        "input_dilation": input_dilation,
        "feature_group_count": groups,
    }
    layer = make("Conv", 4, 6, size, strides, **options)
    x = random(*(7, 6, 5)[: len(size)], 4)
    kernel = spread(value(layer.kernel), kernel_dilation)
    whole = padded(spread(x, input_dilation), padding, kernel, strides)
    channels, kernels = (np.split(a, groups, -1) for a in (whole, kernel))
    y = np.concatenate(list(map(correlate, channels, kernels)), -1)
    y = y[tuple(slice(None, None, s) for s in strides)]
    batch = in_one_program(layer, np.stack([x, -2 * x]))
    agree(batch, np.stack([y, -2 * y]) + value(layer.bias))


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


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_conv_transpose_is_the_transpose_of_conv_with_that_padding(padding, stride):
    options = {"padding": padding, "use_bias": False}
    down = make("Conv", 2, 3, 3, stride, **options)
    up = make("ConvTranspose", 3, 2, 3, stride, transpose_kernel=True, **options)
    up.kernel[...] = down.kernel[...]
    # An odd number of windows, so that strides divide evenly.
    x = random(1, 6 if padding == "SAME" else 2 * stride + 3, 2)
    y = random(*jax.eval_shape(down, x).shape)
    (expected,) = jax.jit(lambda x, y: jax.vjp(down, x)[1](y))(x, y)
    agree(in_one_program(up, y), expected)


@tables.cases("size, stride, dilation", (3, 1, 1), (3, 2, 1), (2, 3, 1), (3, 2, 2))
def test_conv_transpose_adds_copies_of_the_flipped_kernel(size, stride, dilation):
    # As everywhere in deep learning it is the correlation that is transposed.
    options = {"padding": "VALID", "kernel_dilation": dilation}
    layer, x = make("ConvTranspose", 2, 3, size, stride, **options), random(2, 5, 2)
    kernel = value(layer.kernel)[::-1]
    y = np.zeros((2, 5 * stride + max((size - 1) * dilation + 1 - stride, 0), 3))
    for at, tap in itertools.product(range(5), range(size)):
        y[:, at * stride + tap * dilation] += x[:, at] @ kernel[tap]
    agree(in_one_program(layer, x), y + value(layer.bias))


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


@tables.cases("name, args, options, shape, axes, features", *NORMS)
def test_norms_normalize_scale_and_shift(name, args, options, shape, axes, features):
    layers = [make(name, *args, use_fast_variance=x, **options) for x in (True, False)]
    x, mask = 3 + random(*shape), random(*shape, seed=1) > -0.5
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
        y = y * value(layer.scale).reshape(features)
        if name != "RMSNorm":
            y = y + value(layer.bias).reshape(features)
        agree(output, y, 1e-10)  # the variance of two numbers may be small


@tables.cases("axis, axes", (-1, 0), ((1, -1), (0, 2)), (1, (0, 2, 3)))
def test_running_statistics_move_by_the_momentum(axis, axes):
    x = 3 + random(*((4, 6) if axes == 0 else (4, 3, 5, 2)))
    layer = make("BatchNorm", np.size(x.mean(axes)), momentum=0.75, axis=axis)
    mean, var = value(layer.mean), value(layer.var)
    call = nnx.jit(lambda layer, x: layer(x))
    for batch in (x, 2 * x):
        call(layer, batch)
        mean = 0.75 * mean + 0.25 * batch.mean(axes).ravel()
        var = 0.75 * var + 0.25 * batch.var(axes).ravel()
    # These are stored in float32, whatever the inputs are.
    assert layer.mean.dtype == layer.var.dtype == jnp.float32
    np.testing.assert_allclose(layer.mean[...], mean, rtol=2e-7)
    np.testing.assert_allclose(layer.var[...], var, rtol=2e-7)


def test_evaluation_uses_the_running_statistics_and_leaves_them():
    layer, x = make("BatchNorm", 6, use_running_average=True), random(8, 6)
    kept = layer.mean[...]
    mean, var = np.float64(value(layer.mean)), np.float64(value(layer.var))
    y = (x - mean) / np.sqrt(var + 1e-5) * value(layer.scale) + value(layer.bias)
    agree(in_one_program(layer, x), y)
    layer(x)
    assert layer.mean[...] is kept


@pytest.mark.parametrize("fast", [True, False])
def test_statistics_of_complex_numbers(fast):
    options = {"use_scale": False, "use_bias": False, "use_fast_variance": fast}
    x = random(4, 6) + 2j * random(4, 6, seed=1)
    actual = in_one_program(make("LayerNorm", 6, **options), x)
    assert actual.dtype == jnp.complex128
    y = x - x.mean(1, keepdims=True)
    y /= np.sqrt(x.var(1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(actual, y, rtol=1e-12)
    # A BatchNorm keeps the real part of the mean.
    layer = make("BatchNorm", 6, momentum=0.0, **options)
    in_one_program(layer, x)
    np.testing.assert_allclose(layer.mean[...], x.real.mean(0), rtol=2e-7)
    np.testing.assert_allclose(layer.var[...], x.var(0), rtol=2e-7)
