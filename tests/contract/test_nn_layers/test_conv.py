"""Conv and ConvTranspose: padding, masks, what they refuse, formulas by SciPy."""

import contextlib
import itertools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.signal

import graftree as nnx
from tests import comparisons, exact, programs, shapes, tables
from tests.programs import in_one_program
from tests.random_arrays import random

# ------------------------------------------------------------------------------- Conv

BOTH = pytest.mark.parametrize("cls", [nnx.Conv, nnx.ConvTranspose])


def conv(*args, **options):
    return nnx.Conv(*args, **options, rngs=nnx.Rngs(0))


def transpose(*args, **options):
    return nnx.ConvTranspose(*args, **options, rngs=nnx.Rngs(0))


@tables.cases(
    "padding, pairs",
    (1, ((1, 1), (1, 1))),
    (np.int64(2), ((2, 2), (2, 2))),
    ([2, 0], ((2, 2), (0, 0))),
    ([1, (0, 2)], ((1, 1), (0, 2))),
    ([[1, 2], [0, 1]], ((1, 2), (0, 1))),
    (np.array([[1, 2], [1, 1]]), ((1, 2), (1, 1))),
)
def test_explicit_padding_has_many_forms(padding, pairs):
    x = random(1, 5, 4, 2)
    y, same = (conv(2, 3, [3, 2], padding=p)(x) for p in (padding, pairs))
    np.testing.assert_array_equal(y, same)


@pytest.mark.parametrize("padding", [(1, 2), ((1, 2, 3),), (None,), 1.5, ("a",), None])
def test_unknown_padding_is_named(padding):
    with pytest.raises(ValueError, match="Invalid padding format.*len 1"):
        conv(2, 3, (3,), padding=padding)(jnp.ones((1, 5, 2)))


def test_names_of_padding_that_do_not_fit_are_refused():
    with pytest.raises(RuntimeError, match="FOO"):
        conv(2, 3, (3,), padding="FOO")(jnp.ones((1, 5, 2)))
    with pytest.raises(ValueError, match="Causal padding is only implemented for 1D"):
        conv(2, 3, (3, 3), padding="CAUSAL")(jnp.ones((1, 5, 5, 2)))


@pytest.mark.parametrize("kernel_size", [3, np.int64(3), [3], (np.int32(3),)])
def test_kernel_size_takes_ints_and_sequences(kernel_size):
    layer = conv(4, 6, kernel_size, feature_group_count=2)
    assert layer.kernel_size == (3,) and type(layer.kernel_size[0]) is int
    assert layer.kernel.shape == layer.kernel_shape == (3, 2, 6)
    for wrong in ("ab", 1.5, [1.5]):
        with pytest.raises(TypeError):
            conv(4, 6, wrong)


def test_strides_and_dilations_of_none_mean_one_and_others_are_kept_as_given():
    x = random(1, 5, 2)
    given = conv(2, 3, 3, None, input_dilation=None, kernel_dilation=None)
    np.testing.assert_array_equal(given(x), conv(2, 3, 3)(x))
    layer = conv(2, 3, [3], [2], padding=[1], kernel_dilation=2)
    assert (layer.strides, layer.padding, layer.kernel_dilation) == ([2], [1], 2)


def test_groups_must_divide_the_channels():
    layer = conv(3, 4, 3, feature_group_count=2)
    with pytest.raises(AssertionError, match="feature_group_count=2.*in_features=3"):
        layer(jnp.ones((1, 5, 3)))


@BOTH
def test_any_number_of_batch_and_spatial_axes_which_are_independent(cls):
    for size in [(3,), (3, 2), (2, 2, 2, 2)]:
        layer, space = cls(2, 3, size, rngs=nnx.Rngs(0)), (5, 4, 3, 2)[: len(size)]
        for batch in [(), (3,), (0,), (2, 3)]:
            outputs = nnx.eval_shape(layer, jnp.ones((*batch, *space, 2)))
            assert outputs.shape == (*batch, *space, 3)
    layer, x = cls(2, 3, (3,), rngs=nnx.Rngs(0)), random(2, 3, 5, 2)
    y, one = programs.in_one_program(layer, x), programs.in_one_program(layer, x[1, 2])
    np.testing.assert_allclose(y[1, 2], one, rtol=1e-5, atol=1e-6)


def called(layer, x):
    """The lines from which a call is warned of; it may fail."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            with contextlib.suppress(TypeError, ValueError):
                layer(x)
    assert all(x.category is nnx.errors.OneAxisWarning for x in caught)
    # `tests.shapes` calls layers, too.
    assert all(x.filename in (__file__, shapes.__file__) for x in caught)
    return len(caught)


@BOTH
@pytest.mark.parametrize("shape", [(2, 9, 9, 2), (2, 4, 5, 6, 2)])
def test_an_image_given_to_a_layer_of_one_axis_is_warned_of_once(cls, shape):
    layer, x = cls(2, 3, 3, rngs=nnx.Rngs(0)), jnp.ones(shape)
    assert called(layer, x) == 1
    assert called(nnx.jit(lambda x: layer(x)), x) == 1
    assert called(nnx.Sequential(layer, nnx.relu), x) == 1
    whole = re.escape(str((3,) * (len(shape) - 2)))
    with pytest.warns(nnx.errors.OneAxisWarning, match=f"write kernel_size={whole}"):
        layer(x)


@BOTH
def test_what_can_not_be_a_mistake_or_changes_nothing_is_not_warned_of(cls):
    image = jnp.ones((2, 9, 9, 2))
    for size, strides, x in [
        ((3,), 1, image),
        ((3, 3), 1, image),
        (3, 1, image[0]),
        (3, 1, image[..., :1]),  # is an error
        (1, 1, image),
    ]:
        assert called(cls(2, 3, size, strides, rngs=nnx.Rngs(0)), x) == 0
    assert called(cls(2, 3, 1, 2, rngs=nnx.Rngs(0)), image) == 1


def test_causal_outputs_do_not_see_later_inputs():
    layer = conv(1, 1, 3, padding="CAUSAL", kernel_dilation=2)
    jacobian = jax.jit(jax.jacobian(lambda x: layer(x[:, None])[:, 0]))(jnp.ones(6))
    np.testing.assert_array_equal(np.triu(jacobian, 1), np.zeros((6, 6)))


@BOTH
def test_mask_is_multiplied_with_the_kernel_and_is_a_leaf(cls):
    mask = jnp.asarray(np.arange(24).reshape(3, 2, 4) % 3 > 0, float)
    layer, plain = (
        cls(2, 4, 3, mask=m, rngs=nnx.Rngs(0), bias_init=nnx.initializers.ones)
        for m in (mask, None)
    )
    kernel = layer.kernel[...]
    plain.kernel[...] = kernel * mask
    x = random(1, 6, 2)
    np.testing.assert_array_equal(layer(x), plain(x))
    np.testing.assert_array_equal(layer.kernel[...], kernel)
    assert nnx.state(layer)["mask"] is mask
    layer.mask = jnp.ones((3, 2, 5))
    message = r"Mask needs to have the same shape as weights.*\(3, 2, 5\), \(3, 2, 4\)"
    with pytest.raises(ValueError, match=message):
        layer(x)


# --------------------------------------------------------------------- ConvTranspose


@pytest.mark.parametrize("stride", [None, 1, 2, 3])
@pytest.mark.parametrize("padding", ["SAME", "CIRCULAR"])
def test_outputs_are_strides_times_as_long(stride, padding):
    layer = transpose(2, 3, (4, 3), stride, padding=padding)
    factor = stride or 1
    y = nnx.eval_shape(layer, random(2, 5, 4, 2))
    assert y.shape == (2, 5 * factor, 4 * factor, 3)


@tables.cases(
    "transpose_kernel, expected",
    (False, [3, 2, 1, 0, 0, 0, 0, 0]),
    (True, [2, 3, 0, 0, 0, 0, 0, 1]),
)
def test_circular_example_of_the_contract(transpose_kernel, expected):
    options = {"padding": "CIRCULAR", "transpose_kernel": transpose_kernel}
    layer = transpose(1, 1, 3, 2, **options)
    layer.kernel[...] = jnp.array([1.0, 2.0, 3.0]).reshape(3, 1, 1)
    y = layer(jnp.array([1.0, 0.0, 0.0, 0.0]).reshape(1, 4, 1))
    np.testing.assert_array_equal(y.ravel(), expected)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_circular_outputs_follow_a_rotation_of_the_inputs(size):
    layer, x = transpose(2, 3, size, 2, padding="CIRCULAR"), random(1, 5, 2)
    y = programs.in_one_program(layer, x)
    rotated = programs.in_one_program(layer, jnp.roll(x, 1, axis=1))
    np.testing.assert_allclose(rotated, np.roll(y, 2, axis=1), atol=1e-5)


def test_bias_is_added_once_after_the_fold():
    options = {"padding": "CIRCULAR", "bias_init": nnx.initializers.ones}
    layer = transpose(1, 1, 5, **options)
    np.testing.assert_array_equal(layer(jnp.zeros((1, 3, 1))), jnp.ones((1, 3, 1)))


# ------------------------------------------------------------ what is no image


@pytest.mark.parametrize("cls", [nnx.Conv, nnx.ConvTranspose])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_channels_first_are_told(cls, batch):
    layer = cls(3, 4, (3, 3), rngs=nnx.Rngs(0))
    what = f"{cls.__name__} with kernel_size=(3, 3)", "[*batch, *spatial, 3]"
    way_out = "Channels come last, unlike in PyTorch: jnp.moveaxis(x, -3, -1)"
    x = jnp.ones((*batch, 3, 8, 9))
    with comparisons.raises(ValueError, *what, "float32[1,3,8,9]"[-6:], way_out):
        layer(x)
    assert layer(jnp.moveaxis(x, -3, -1)).shape[-1] == 4


# ------------------------------------------------------------ empty results

VALID = {"padding": "VALID"}
NO_PADDING = {"padding": ((0, 0), (0, 0))}
EMPTY = {
    "Conv": lambda rngs: nnx.Conv(3, 4, (3, 3), **VALID, rngs=rngs),
    "Conv, dilated": lambda rngs: nnx.Conv(
        3, 4, (2, 2), **VALID, kernel_dilation=2, rngs=rngs
    ),
    "ConvTranspose": lambda rngs: nnx.ConvTranspose(3, 4, (3, 3), padding=0, rngs=rngs),
    **{
        f"{name} {options['padding']}": lambda rngs, name=name, options=options: (
            getattr(nnx, name)((3, 3), **options)
        )
        for name in ("MaxPool", "MinPool", "AvgPool")
        for options in (VALID, NO_PADDING)
    },
}


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_result_of_inputs_that_are_not_is_an_error(name):
    layer = EMPTY[name](nnx.Rngs(0))
    words = "has an empty result", "inputs: float32[", "outputs: float32["
    with comparisons.raises(ValueError, *words):
        layer(jnp.ones((1, 2, 2, 3)))
    with comparisons.raises(ValueError, *words):
        jax.eval_shape(layer, jnp.ones((1, 2, 2, 3)))
    assert layer(jnp.ones((0, 4, 4, 3))).shape[0] == 0


@pytest.mark.parametrize("padding", [0, 1, 2])
@pytest.mark.parametrize("dilation", [1, 2])
def test_the_padding_of_pytorch_is_told_as_it_is_here(padding, dilation):
    """The rule in the message; the length is that of PyTorch's documentation."""
    size, stride, length = 3, 2, 4
    options = {"kernel_dilation": dilation, "rngs": nnx.Rngs(0)}
    width = dilation * (size - 1) - padding
    layer = nnx.ConvTranspose(1, 1, (size,), stride, padding=width, **options)
    expected = (length - 1) * stride - 2 * padding + dilation * (size - 1) + 1
    y = layer(jnp.ones((1, length, 1)))
    assert y.shape[1] == expected
    if padding == 0:
        valid = nnx.ConvTranspose(1, 1, (size,), stride, padding="VALID", **options)
        assert valid(jnp.ones((1, length, 1))).shape == y.shape
    small = nnx.ConvTranspose(1, 1, (3,), padding=0, rngs=nnx.Rngs(0))
    with comparisons.raises(ValueError, 'its 0 is padding="VALID"'):
        small(jnp.ones((1, 2, 1)))


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


@exact.in_float64
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
    layer = exact.make("Conv", 4, 6, size, strides, **options)
    x = exact.random(*(7, 6, 5)[: len(size)], 4)
    kernel = spread(exact.value(layer.kernel), kernel_dilation)
    whole = padded(spread(x, input_dilation), padding, kernel, strides)
    channels, kernels = (np.split(a, groups, -1) for a in (whole, kernel))
    y = np.concatenate(list(map(correlate, channels, kernels)), -1)
    y = y[tuple(slice(None, None, s) for s in strides)]
    batch = in_one_program(layer, np.stack([x, -2 * x]))
    exact.agree(batch, np.stack([y, -2 * y]) + exact.value(layer.bias))


@exact.in_float64
@pytest.mark.parametrize("pads", [(0, 0), (1, 1), (3, 1)])
@pytest.mark.parametrize("stride", [1, 2])
def test_conv_transpose_is_the_transpose_of_the_correlation(stride, pads):
    size, length = 4, 10  # strides divide the length evenly
    padding = [tuple(size - 1 - pad for pad in pads)]
    options = {"padding": padding, "transpose_kernel": True, "use_bias": False}
    layer = exact.make("ConvTranspose", 3, 2, size, stride, **options)
    kernel = exact.value(layer.kernel)

    def correlation(x):
        return correlate(np.pad(x, [pads, (0, 0)]), kernel)[::stride]

    basis = np.eye(length * 2).reshape(-1, length, 2)
    matrix = np.stack([correlation(x).ravel() for x in basis])
    y = exact.random(*correlation(basis[0]).shape)
    exact.agree(
        in_one_program(layer, y[None]), (matrix @ y.ravel()).reshape(1, length, 2)
    )


@exact.in_float64
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_conv_transpose_is_the_transpose_of_conv_with_that_padding(padding, stride):
    options = {"padding": padding, "use_bias": False}
    down = exact.make("Conv", 2, 3, 3, stride, **options)
    up = exact.make("ConvTranspose", 3, 2, 3, stride, transpose_kernel=True, **options)
    up.kernel[...] = down.kernel[...]
    # An odd number of windows, so that strides divide evenly.
    x = exact.random(1, 6 if padding == "SAME" else 2 * stride + 3, 2)
    y = exact.random(*jax.eval_shape(down, x).shape)
    (expected,) = jax.jit(lambda x, y: jax.vjp(down, x)[1](y))(x, y)
    exact.agree(in_one_program(up, y), expected)


@exact.in_float64
@tables.cases("size, stride, dilation", (3, 1, 1), (3, 2, 1), (2, 3, 1), (3, 2, 2))
def test_conv_transpose_adds_copies_of_the_flipped_kernel(size, stride, dilation):
    # As everywhere in deep learning it is the correlation that is transposed.
    options = {"padding": "VALID", "kernel_dilation": dilation}
    layer, x = (
        exact.make("ConvTranspose", 2, 3, size, stride, **options),
        exact.random(2, 5, 2),
    )
    kernel = exact.value(layer.kernel)[::-1]
    y = np.zeros((2, 5 * stride + max((size - 1) * dilation + 1 - stride, 0), 3))
    for at, tap in itertools.product(range(5), range(size)):
        y[:, at * stride + tap * dilation] += x[:, at] @ kernel[tap]
    exact.agree(in_one_program(layer, x), y + exact.value(layer.bias))
