"""What no layer can work with is refused in our words: sizes, positions, windows."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import catalog, comparisons

WRONG_SIZES = {
    "None": (None, TypeError, "Layers infer no sizes from their inputs"),
    "text": ("4", TypeError, "A size is the number of entries along an axis"),
    "float": (2.5, TypeError, "write a // b: a / b is a float"),
    "negative": (-1, ValueError, "A size is the number of entries along an axis"),
}


def sizes_of(row):
    """The names of the positional arguments that are sizes."""
    pairs = zip(row.parameters(), ("self", *row.arguments), strict=False)
    return [
        name
        for name, value in pairs
        if type(value) is int
        or (isinstance(value, tuple) and all(type(n) is int for n in value))
    ]


SIZES = [
    pytest.param(row, name, id=f"{row.name}-{name}")
    for row in catalog.LAYERS
    for name in sizes_of(row)
    if (row.name, name) != ("Einsum", "bias_shape")  # which may be None
    if name not in ("strides", "num_groups")
]


@pytest.mark.parametrize("wrong", WRONG_SIZES)
@pytest.mark.parametrize(("row", "name"), SIZES)
def test_what_is_no_size_is_named(row, name, wrong):
    value, kind, way_out = WRONG_SIZES[wrong]
    names = list(row.parameters())[1:]
    arguments = dict(zip(names, row.arguments, strict=False)) | {name: value}
    rngs = {"rngs": nnx.Rngs(0)} if row.has_rngs else {}
    what = f"{row.name} expects "
    with comparisons.raises(kind, what, f"{name}={value!r}", way_out):
        row.cls()(**arguments, **row.keywords, **rngs)


def test_a_size_among_several_is_named():
    with comparisons.raises(TypeError, "Conv expects", "kernel_size=(3, None)"):
        nnx.Conv(1, 1, (3, None), rngs=nnx.Rngs(0))


POSITIONAL = [
    row
    for row in catalog.LAYERS
    if row.has_rngs and row.parameters()["rngs"].kind is inspect.Parameter.KEYWORD_ONLY
]


@pytest.mark.parametrize("row", POSITIONAL, ids=lambda row: row.name)
def test_rngs_by_position_are_refused_with_the_call_to_write(row):
    inner = [catalog.BY_NAME[name].make() for name in row.wraps]
    given = [*inner, *row.arguments, nnx.Rngs(0)]
    what = f"{row.name} takes rngs by keyword only"
    if row.name in ("RNN", "Bidirectional", "Dropout"):
        given += [None] * 9  # rngs are optional: the call has to fail
    with comparisons.raises(TypeError, what, f"Write {row.name}(", "rngs=rngs"):
        row.cls()(*given, **row.keywords)


def test_rngs_by_position_are_refused_by_modules_of_ones_own():
    class Block(nnx.Module):
        def __init__(self, features, *, rngs):
            self.linear = nnx.Linear(features, features, rngs=rngs)

    way_out = "by position: features", "Write Block(4, rngs=rngs)."
    with comparisons.raises(TypeError, "Block takes rngs by keyword only", *way_out):
        Block(4, nnx.Rngs(0))
    with pytest.raises(TypeError, match="unexpected keyword argument 'size'"):
        Block(size=4, rngs=nnx.Rngs(0))


def test_errors_within_a_constructor_pass_through():
    class Block(nnx.Module):
        def __init__(self, rngs, **options):
            self.linear = nnx.Linear(2, 2, unknown=1, rngs=rngs)

    with pytest.raises(TypeError, match="unexpected keyword argument 'unknown'"):
        Block(nnx.Rngs(0))


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


def test_other_wrong_channels_are_told():
    layer = nnx.Conv(4, 4, (3,), feature_group_count=2, rngs=nnx.Rngs(0))
    with comparisons.raises(ValueError, "[*batch, *spatial, 4]", "with 4 features"):
        layer(jnp.ones((1, 8, 2)))


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
