"""What no layer can work with is refused in our words: sizes, positions, windows."""

import inspect

import pytest

import graftree as nnx
from tests import catalog, comparisons

FROM_AN_EXAMPLE = (
    "Layers don't infer sizes from their inputs: pass x.shape[-1]. If other layers\n"
    "make x, nnx.eval_shape gets its shape from an example: "
    "docs/guides/initialization.md."
)
EXPECTED = {TypeError: "integers as sizes", ValueError: "sizes of at least 0"}
WRONG_SIZES = {
    "None": (None, TypeError, FROM_AN_EXAMPLE),
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
    if name not in ("strides", "num_groups") and not row.builds
]


@pytest.mark.parametrize("wrong", WRONG_SIZES)
@pytest.mark.parametrize(("row", "name"), SIZES)
def test_what_is_no_size_is_named(row, name, wrong):
    value, kind, way_out = WRONG_SIZES[wrong]
    names = list(row.parameters())[1:]
    arguments = dict(zip(names, row.arguments, strict=False)) | {name: value}
    rngs = {"rngs": nnx.Rngs(0)} if row.has_rngs else {}
    what = f"{row.name} expects {EXPECTED[kind]}"
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
