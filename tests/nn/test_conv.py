"""Conv against explicit loops in float64, for every padding, and against the peer."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests.programs import in_one_program
from tests.random_arrays import initializer, random


def correlate(x, kernel, strides, kernel_dilation, groups):
    """Cross-correlation without padding, by explicit loops in float64."""
    x, kernel = np.float64(x), np.float64(kernel)
    size = kernel.shape[:-2]
    spans = [(k - 1) * d + 1 for k, d in zip(size, kernel_dilation, strict=True)]
    out = [
        (n - s) // t + 1 for n, s, t in zip(x.shape[1:-1], spans, strides, strict=True)
    ]
    features = kernel.shape[-1]
    y = np.zeros((x.shape[0], *out, features))
    for at in np.ndindex(*out):
        for tap in np.ndindex(*size):
            where = [
                a * t + k * d
                for a, t, k, d in zip(at, strides, tap, kernel_dilation, strict=True)
            ]
            pixels = np.split(x[(slice(None), *where)], groups, axis=-1)
            weights = np.split(kernel[tap], groups, axis=-1)
            products = [p @ w for p, w in zip(pixels, weights, strict=True)]
            y[(slice(None), *at)] += np.concatenate(products, axis=-1)
    return y


def dilate(x, dilation):
    """Zeros between neighbours along the spatial axes."""
    shape = [(n - 1) * d + 1 for n, d in zip(x.shape[1:-1], dilation, strict=True)]
    y = np.zeros((x.shape[0], *shape, x.shape[-1]))
    y[(slice(None), *(slice(None, None, d) for d in dilation))] = x
    return y


def pad(x, padding, size, strides, kernel_dilation):
    """What the padding of the name adds to the inputs."""
    modes = {"CIRCULAR": "wrap", "REFLECT": "reflect"}
    widths = []
    for n, k, t, d in zip(x.shape[1:-1], size, strides, kernel_dilation, strict=True):
        span = (k - 1) * d + 1
        total = max((-(-n // t) - 1) * t + span - n, 0)
        widths.append(
            {
                "VALID": (0, 0),
                "SAME": (total // 2, total - total // 2),
                "SAME_LOWER": (total - total // 2, total // 2),
                "CIRCULAR": ((span - 1) // 2, span // 2),
                "REFLECT": ((span - 1) // 2, span // 2),
                "CAUSAL": (span - 1, 0),
            }[padding]
        )
    return np.pad(x, [(0, 0), *widths, (0, 0)], mode=modes.get(padding, "constant"))


CASES = list(
    itertools.product(
        ["SAME", "SAME_LOWER", "VALID", "CIRCULAR", "REFLECT", "CAUSAL"],
        [((3,), 1, 1, 1), ((4,), 2, 1, 1), ((3,), 1, 2, 1), ((2,), 2, 2, 2)],
    )
) + [
    ("SAME", ((3, 2), (2, 1), (1, 2), (1, 1))),
    ("SAME", ((3,), 3, 1, 2)),
    ("CIRCULAR", ((3, 4), 1, (2, 1), (1, 3))),
    ("REFLECT", ((2, 3), (1, 2), 1, 2)),
    ("VALID", ((2, 2, 2), 1, (1, 2, 1), 1)),
]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("padding", "sizes"), CASES)
def test_conv_equals_explicit_loops(padding, sizes, groups):
    kernel_size, strides, kernel_dilation, input_dilation = sizes
    layer = nnx.Conv(
        4,
        6,
        kernel_size,
        strides,
        padding=padding,
        input_dilation=input_dilation,
        kernel_dilation=kernel_dilation,
        feature_group_count=groups,
        kernel_init=initializer,
        rngs=nnx.Rngs(0),
    )
    rank = len(kernel_size)
    strides, kernel_dilation, input_dilation = (
        tuple(np.broadcast_to(v, rank))
        for v in (strides, kernel_dilation, input_dilation)
    )
    x = random(2, *(7, 6, 5)[:rank], 4)
    padded = pad(
        dilate(x, input_dilation), padding, kernel_size, strides, kernel_dilation
    )
    kernel = layer.kernel[...]
    expected = correlate(padded, kernel, strides, kernel_dilation, groups)
    y = in_one_program(layer, x)
    assert y.shape == expected.shape
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("padding", "pairs"),
    [
        (1, (1, 1)),
        (np.int64(2), (2, 2)),
        ([2], (2, 2)),
        (((1, 2),), (1, 2)),
        ([[1, 2]], (1, 2)),
        (np.array([[1, 2]]), (1, 2)),
    ],
)
def test_explicit_padding_adds_zeros(padding, pairs):
    layer = nnx.Conv(2, 3, [3], padding=padding, rngs=nnx.Rngs(0))
    x = random(2, 5, 2)
    padded = np.pad(x, [(0, 0), pairs, (0, 0)])
    expected = correlate(padded, layer.kernel[...], (1,), (1,), 1)
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("padding", [(1, 2), ((1, 2, 3),), (None,), 1.5, ("a",), None])
def test_unknown_padding_is_named(padding):
    layer = nnx.Conv(2, 3, (3,), padding=padding, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="Invalid padding format.*len 1"):
        layer(jnp.ones((1, 5, 2)))


def test_unknown_name_of_padding_is_an_error_of_the_operation():
    layer = nnx.Conv(2, 3, (3,), padding="FOO", rngs=nnx.Rngs(0))
    with pytest.raises(RuntimeError, match="FOO"):
        layer(jnp.ones((1, 5, 2)))


def test_causal_padding_is_for_one_axis():
    layer = nnx.Conv(2, 3, (3, 3), padding="CAUSAL", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="Causal padding is only implemented for 1D"):
        layer(jnp.ones((1, 5, 5, 2)))


def test_causal_outputs_do_not_see_later_inputs():
    layer = nnx.Conv(1, 1, 3, padding="CAUSAL", kernel_dilation=2, rngs=nnx.Rngs(0))
    jacobian = jax.jit(jax.jacobian(lambda x: layer(x[:, None])[:, 0]))(jnp.ones(6))
    np.testing.assert_array_equal(np.triu(jacobian, 1), np.zeros((6, 6)))


@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (0,), (2, 0), (1, 2, 3)])
def test_any_number_of_batch_axes(batch):
    layer = nnx.Conv(2, 3, (3, 2), rngs=nnx.Rngs(0))
    x = random(*batch, 5, 4, 2)
    y = layer(x)
    assert y.shape == (*batch, 5, 4, 3)
    flat = layer(np.reshape(x, (-1, 5, 4, 2))) if x.size else y
    np.testing.assert_allclose(y, np.reshape(flat, y.shape), rtol=1e-6)


def test_inputs_with_too_few_axes_are_named():
    layer = nnx.Conv(2, 3, (3, 3), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"(?s)at least 3 axes.*inputs: .*\[5, 2\]"):
        layer(jnp.ones((5, 2)))


def test_wrong_number_of_channels_is_named():
    with pytest.raises(ValueError, match="feature dimension size.* 4 // 1 != 2"):
        nnx.Conv(2, 3, 3, rngs=nnx.Rngs(0))(jnp.ones((1, 5, 4)))


def test_groups_must_divide_the_channels():
    layer = nnx.Conv(3, 4, 3, feature_group_count=2, rngs=nnx.Rngs(0))
    with pytest.raises(AssertionError, match="feature_group_count=2.*in_features=3"):
        layer(jnp.ones((1, 5, 3)))


@pytest.mark.parametrize("kernel_size", [3, np.int64(3), [3], (np.int32(3),)])
def test_kernel_size_takes_ints_and_sequences(kernel_size):
    layer = nnx.Conv(4, 6, kernel_size, feature_group_count=2, rngs=nnx.Rngs(0))
    assert layer.kernel_size == (3,)
    assert layer.kernel.shape == layer.kernel_shape == (3, 2, 6)


def test_strides_and_dilations_of_none_mean_one():
    x = random(1, 5, 2)
    given = nnx.Conv(
        2, 3, 3, None, input_dilation=None, kernel_dilation=None, rngs=nnx.Rngs(0)
    )
    np.testing.assert_array_equal(given(x), nnx.Conv(2, 3, 3, rngs=nnx.Rngs(0))(x))


def test_arguments_are_kept_as_given():
    layer = nnx.Conv(2, 3, [3], [2], padding=[1], kernel_dilation=2, rngs=nnx.Rngs(0))
    assert layer.strides == [2]
    assert layer.padding == [1]
    assert layer.kernel_dilation == 2


def test_mask_is_multiplied_with_the_kernel_and_is_a_leaf():
    mask = jnp.ones((3, 2, 4)).at[0].set(0)
    layer = nnx.Conv(2, 4, 3, mask=mask, rngs=nnx.Rngs(0))
    kernel = layer.kernel[...]
    x = random(1, 6, 2)
    plain = nnx.Conv(2, 4, 3, rngs=nnx.Rngs(0))
    plain.kernel[...] = kernel * mask
    np.testing.assert_array_equal(layer(x), plain(x))
    np.testing.assert_array_equal(layer.kernel[...], kernel)
    assert nnx.state(layer)["mask"] is mask


def test_mask_of_another_shape_is_refused_at_the_call():
    layer = nnx.Conv(2, 4, 3, mask=jnp.ones((3, 2, 5)), rngs=nnx.Rngs(0))
    message = r"Mask needs to have the same shape as weights.*\(3, 2, 5\), \(3, 2, 4\)"
    with pytest.raises(ValueError, match=message):
        layer(jnp.ones((1, 5, 2)))


def test_hooks_get_the_forms_of_the_contract():
    promoted, convolved = [], []

    def promote(args, **kwargs):
        promoted.append((len(args), args[2], kwargs))
        return args

    def convolve(*args, **kwargs):
        convolved.append((args[2:], kwargs))
        return jax.lax.conv_general_dilated(*args, **kwargs)

    layer = nnx.Conv(
        2,
        3,
        (3, 3),
        use_bias=False,
        promote_dtype=promote,
        conv_general_dilated=convolve,
        rngs=nnx.Rngs(0),
    )
    layer(jnp.ones((1, 5, 5, 2)))
    assert promoted == [(3, None, {"dtype": None})]
    ((positional, keywords),) = convolved
    assert positional == ((1, 1), "SAME")
    numbers = jax.lax.ConvDimensionNumbers((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2))
    assert keywords == {
        "lhs_dilation": (1, 1),
        "rhs_dilation": (1, 1),
        "dimension_numbers": numbers,
        "feature_group_count": 1,
        "precision": None,
    }


PEER_CASES = [
    {},
    {"strides": 2},
    {"padding": "VALID", "strides": (2,)},
    {"padding": "CIRCULAR", "kernel_dilation": 2},
    {"padding": "CIRCULAR", "strides": 2},
    {"padding": "REFLECT"},
    {"padding": "CAUSAL", "kernel_dilation": (2,)},
    {"padding": "SAME_LOWER"},
    {"padding": 2, "input_dilation": 2},
    {"padding": [(1, 0)], "feature_group_count": 2},
    {"padding": (2,), "feature_group_count": 4, "use_bias": False},
    {"mask": jnp.arange(3 * 4 * 8).reshape(3, 4, 8) % 2},
]


@pytest.mark.peers
@pytest.mark.parametrize("options", PEER_CASES, ids=str)
@pytest.mark.parametrize(
    "dtypes", [{}, {"dtype": jnp.bfloat16}, {"param_dtype": jnp.float16}], ids=str
)
def test_conv_equals_the_peer(peer, options, dtypes):
    ours = nnx.Conv(4, 8, 3, **options, **dtypes, rngs=nnx.Rngs(1))
    theirs = peer.Conv(4, 8, 3, **options, **dtypes, rngs=peer.Rngs(1))
    np.testing.assert_array_equal(ours.kernel[...], theirs.kernel[...])
    x = random(2, 3, 9, 4)
    assert ours(x).dtype == theirs(x).dtype
    np.testing.assert_allclose(
        ours(x).astype(float), theirs(x).astype(float), rtol=1e-5, atol=1e-6
    )
