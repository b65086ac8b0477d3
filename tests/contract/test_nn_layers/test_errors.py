"""Wrong inputs are named, and nothing has changed then (contract, sections 2 and 15).

A row is a layer, what it must not be called with, the exception that the contract or
the peer has, and what its message says: JAX's, where JAX refuses it. The note says
where that was, and what was given.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import catalog
from tests.random_arrays import random

ones = jnp.ones


def make(name, *args, **options):
    return getattr(nnx, name)(*args, **options, rngs=nnx.Rngs(0))


def stateful(name, *args, **options):
    return lambda: make(name, *args, **options)


LINEAR = stateful("Linear", 2, 3)
GENERAL = stateful("LinearGeneral", (2, 4), 3, axis=(-2, -1), batch_axis={0: 5})
EINSUM = stateful("Einsum", "ab,bc->ac", (2, 3))
CONV = stateful("Conv", 4, 6, (3, 3), feature_group_count=2)
TRANSPOSE = stateful("ConvTranspose", 2, 3, (3, 3))
FLIPPED = stateful("ConvTranspose", 2, 3, 3, transpose_kernel=True)
EMBED = stateful("Embed", 5, 3)
BATCH = stateful("BatchNorm", 3)
BARE = stateful("BatchNorm", 3, use_scale=False, use_bias=False)
AREA = stateful("BatchNorm", 6, axis=(1, 2))
LAYER = stateful("LayerNorm", 3)
RMS = stateful("RMSNorm", 3)
INSTANCE = stateful("InstanceNorm", 3)
GROUP = stateful("GroupNorm", 4, 2)
GROUP_BARE = stateful("GroupNorm", 4, 2, use_scale=False, use_bias=False)
DROPOUT = stateful("Dropout", 0.5, broadcast_dims=(2,))

SAME_SHAPE = "contracting dimensions to have the same shape"
AXES = "less than the number of axes"
CHANNELS = "lhs feature dimension size"
SIZE = "cannot reshape array of shape (3,)"

SHAPES = [
    (LINEAR, ones((1, 4)), TypeError, f"{SAME_SHAPE}, got (4,) and (2,)"),
    (LINEAR, ones(()), TypeError, AXES),
    (LINEAR, [[1, 2, 3]], TypeError, SAME_SHAPE),
    (GENERAL, ones((5, 4, 2)), TypeError, f"{SAME_SHAPE}, got (4, 2) and (2, 4)"),
    (GENERAL, ones((3, 2, 4)), TypeError, "batch dimensions"),
    (GENERAL, ones(4), TypeError, AXES),
    (EINSUM, ones((1, 4)), ValueError, "label 'b'.*(4) does not match .* (2)"),
    (EINSUM, ones((1, 1, 2)), ValueError, "number of indices"),
    (CONV, ones((1, 5, 5, 2)), ValueError, f"{CHANNELS}.* 2 // 2 != 2"),
    (CONV, ones((5, 4)), ValueError, "Conv.*at least 3 axes"),
    (TRANSPOSE, ones((5, 5, 3)), ValueError, f"{CHANNELS}.* 3 // 1 != 2"),
    (TRANSPOSE, ones((5, 2)), ValueError, "ConvTranspose.*at least 3 axes"),
    (FLIPPED, ones((1, 5, 3)), ValueError, f"{CHANNELS}.* 3 // 1 != 2"),
    (BATCH, ones((2, 4)), TypeError, SIZE),
    (BATCH, ones((2, 1)), TypeError, SIZE),
    (BATCH, ones(()), IndexError, "axis -1 is out of bounds"),
    (BARE, ones((2, 1)), TypeError, "(size 1) into shape (3,)"),
    (AREA, ones((4, 2, 2)), TypeError, "(size 6) into shape (1, 2, 2)"),
    (LAYER, ones((2, 4)), TypeError, SIZE),
    (LAYER, ones(()), IndexError, "axis -1 is out of bounds"),
    (RMS, ones((2, 4)), TypeError, SIZE),
    (INSTANCE, ones((2, 5, 4)), TypeError, SIZE),
    (GROUP, ones((2, 5, 8)), TypeError, "into shape (2, 5, 2, 2)"),
    (GROUP_BARE, ones((2, 5, 8)), TypeError, "into shape (2, 5, 2, 2)"),
    (GROUP, ones(()), TypeError, "into shape (2, 2)"),
    (DROPOUT, ones((2, 2)), IndexError, "axis 2 is out of bounds"),
    (EMBED, ones(2), ValueError, "must be an integer"),
    (EMBED, ones(2, bool), ValueError, "must be an integer"),
]
NO_NUMBERS = [
    (make, inputs, (TypeError, ValueError), "")
    for make in (LINEAR, GENERAL, EINSUM, CONV, TRANSPOSE, EMBED)
    + (BATCH, LAYER, RMS, INSTANCE, GROUP, DROPOUT)
    for inputs in (None, "text", jax.random.split(jax.random.key(0), (2, 2)))
]


def pattern(message):
    """The message as a regular expression in which only ``.*`` is special."""
    special = {"[": r"\[", "]": r"\]", "(": r"\(", ")": r"\)"}
    return "(?s)" + "".join(special.get(c, c) for c in message)


def fails(layer, call, error, message, note=""):
    before = catalog.state_of(layer)
    with pytest.raises(error, match=pattern(message)) as caught:
        call(layer)
    assert note in "".join(getattr(caught.value, "__notes__", ()))
    after = catalog.state_of(layer)
    assert list(before) == list(after)
    for path, value in before.items():
        np.testing.assert_array_equal(value, after[path])


@pytest.mark.parametrize(("make", "inputs", "error", "message"), SHAPES + NO_NUMBERS)
def test_wrong_inputs_are_named_and_change_nothing(make, inputs, error, message):
    layer = make()
    given = f": {jax.typeof(inputs)}" if hasattr(inputs, "dtype") else ""
    name = type(layer).__name__
    note = f"at {name}\n  {'x' if 'Norm' in name else 'inputs'}{given}"
    fails(layer, lambda layer: layer(inputs), error, message, note)


@pytest.mark.parametrize(
    "row", [row for row in SHAPES if not isinstance(row[1], list)][::4]
)
def test_wrong_inputs_are_named_inside_programs(row):
    make, inputs, error, message = row
    for jit in (jax.jit, nnx.jit):
        call = jit(lambda layer, x: layer(x))
        fails(make(), lambda layer: call(layer, inputs), error, message)  # noqa: B023


MASKS = [ones(shape, bool) for shape in ((2, 4, 3), 4, (1, 2, 5, 3))] + [
    ones((2, 5, 3))
]


@pytest.mark.parametrize("make", [BATCH, LAYER, RMS, INSTANCE])
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: f"{mask.dtype}{mask.shape}")
def test_wrong_masks_are_named_and_change_nothing(make, mask):
    x = ones((2, 5, 3))
    message = "boolean" if mask.dtype != bool else "broadcast"
    note = f"x: float32[2,5,3]\n  mask: {jax.typeof(mask)}"
    fails(make(), lambda layer: layer(x, mask=mask), ValueError, message, note)


def test_statistics_of_another_size_are_found_before_one_is_written():
    layer = BARE()
    layer.var = nnx.BatchStat(ones(4))
    wrong = "(size 3) into shape (4,)"
    fails(layer, lambda layer: layer(ones((2, 3))), TypeError, wrong, "at BatchNorm")


@pytest.mark.parametrize("dtype", [jnp.int32, bool])
@pytest.mark.parametrize("name", ["Linear", "Conv", "BatchNorm", "GroupNorm"])
def test_dtypes_of_integers_are_refused_by_the_call(name, dtype):
    row = catalog.BY_NAME[name]
    layer = row.make(dtype=dtype)
    fails(layer, lambda m: m(*row.inputs()), ValueError, "Dtype must be inexact")


@pytest.mark.parametrize("name", ["strides", "kernel_dilation", "input_dilation"])
def test_conv_needs_one_entry_per_spatial_axis(name):
    layer = make("Conv", 2, 3, (3, 3), **{name: (1,)})
    message = f"Conv with kernel_size=(3, 3) needs 2 {name}.*got (1,)"
    fails(layer, lambda layer: layer(ones((1, 5, 5, 2))), ValueError, message)


def test_wrong_queries_of_embed_are_named():
    call = lambda layer: layer.attend(ones((2, 4)))  # noqa: E731
    message = f"{SAME_SHAPE}, got (4,) and (3,)"
    fails(EMBED(), call, TypeError, message, "at Embed.attend, an Embed\n  query: ")


def test_bias_that_does_not_fit_the_equation_is_named():
    layer = make("Einsum", "ab,bc->ac", (2, 3), 4)
    call = lambda layer: layer(ones((1, 2)))  # noqa: E731
    fails(layer, call, TypeError, "(size 4) into shape (1, 3)", "bias Param float32[4]")


def test_subclasses_have_their_own_name():
    class Head(nnx.Linear):
        pass

    head = Head(2, 3, rngs=nnx.Rngs(0))
    fails(head, lambda head: head(ones((1, 4))), TypeError, SAME_SHAPE, "at Head\n")


# ------------------------------------------------------------- what must go on working


def test_kernels_of_another_shape_decide_what_fits():
    layer = make("Linear", 2, 3, use_bias=False)
    layer.kernel = nnx.Param(ones((5, 7)))
    assert layer(ones((1, 5))).shape == (1, 7)
    conv = make("Conv", 2, 3, 3, use_bias=False)
    conv.kernel = nnx.Param(ones((3, 4, 6)))
    assert conv(ones((1, 5, 4))).shape == (1, 5, 6)
    norm = make("LayerNorm", 3)
    norm.scale, norm.bias = nnx.Param(ones(4)), nnx.Param(ones(4))
    assert norm(ones((2, 4))).shape == (2, 4)


def test_norms_without_params_take_any_number_of_features():
    for name in ("LayerNorm", "RMSNorm", "InstanceNorm"):
        options = {} if name == "RMSNorm" else {"use_bias": False}
        layer = make(name, 3, use_scale=False, **options)
        assert layer(ones((2, 5, 4))).shape == (2, 5, 4)


class Quantized:
    """An operand that is no array: integers and their scale, without a shape."""

    def __init__(self, x):
        self.scale = jnp.abs(x).max() / 127
        self.integers = jnp.round(x / self.scale).astype(jnp.int8)
        self.ndim = x.ndim

    def dequantize(self):
        return self.integers * self.scale


def quantize(args, *, dtype):
    inputs, kernel, bias = args
    return Quantized(inputs), Quantized(kernel), bias


def quantized_dot(lhs, rhs, *args, **options):
    return jax.lax.dot_general(lhs.dequantize(), rhs.dequantize(), *args, **options)


def test_hooks_may_hand_over_operands_without_a_shape():
    exact = make("Linear", 4, 3)
    layer = make("Linear", 4, 3, promote_dtype=quantize, dot_general=quantized_dot)
    x = random(5, 4)
    np.testing.assert_allclose(jax.jit(lambda x: layer(x))(x), exact(x), atol=0.05)


def test_hooks_may_store_a_kernel_in_another_shape():
    def unpack(lhs, rhs, *args, **options):
        return jax.lax.dot_general(lhs, jnp.repeat(rhs, 2, axis=0), *args, **options)

    layer = make("Linear", 4, 3, dot_general=unpack)
    layer.kernel = nnx.Param(ones((2, 3)))
    np.testing.assert_array_equal(layer(ones((1, 4))), [[4.0, 4.0, 4.0]])
