"""Layouts of lines in tables: both directions, any piece, and what is refused."""

import math

import numpy as np
import pytest

import graftree as nnx
from tests import tables

rng = np.random.default_rng(0)

# Layout, shapes of our arrays, the tensor by NumPy, and the sizes that are given.
CASES = {
    "transposed": ("o i -> i o", [(3, 4)], lambda x: x.T),
    "split": ("(h d) e -> e h d", [(5, 2, 3)], lambda x: x.reshape(5, 6).T),
    "joined": ("a b -> (a b)", [(12,)], lambda x: x.reshape(3, 4), {"a": 3}),
    "conv": ("o i h w -> h w i o", [(2, 3, 4, 5)], lambda x: x.transpose(3, 2, 0, 1)),
    "reversed": ("i o ~k -> k i o", [(4, 2, 3)], lambda x: x[::-1].transpose(1, 2, 0)),
    "an axis of one": ("o 1 -> o", [(4,)], lambda x: x[:, None]),
    "a scalar": ("->", [()], lambda x: x),
    "one after the other": (
        "+(h d) e -> e h d",
        [(5, 4, 3), (5, 2, 3), (5, 2, 3)],
        lambda *xs: np.concatenate([x.reshape(5, -1).T for x in xs]),
    ),
    "the same, last": ("e +f -> e f", [(3, 4), (3, 5)], lambda *xs: np.hstack(xs)),
    "in turn": (
        "(h part d) e -> e h d",
        [(5, 4, 3)] * 3,
        lambda *xs: np.stack([x.transpose(1, 2, 0) for x in xs], 1).reshape(-1, 5),
    ),
    "within groups": (
        "(g +h d) e -> e (g h) d",
        [(5, 8, 3), (5, 2, 3)],
        lambda q, k: (
            np.concatenate([q.reshape(5, 2, 4, 3), k.reshape(5, 2, 1, 3)], 2)
            .reshape(5, -1)
            .T
        ),
        {"g": 2},
    ),
    "empty": ("o i -> i o", [(0, 4)], lambda x: x.T),
}


def mapping(layout, sizes=None, count=1):
    """A table of one line, for so many arrays."""
    paths = [*"abc"[:count]]
    line = (paths[0] if count == 1 else paths), layout, sizes or {}
    return nnx.weights.Mapping({"tensor": line})


def solved(layout, shapes, sizes=None):
    """The layout with the sizes that arrays have."""
    arrays = [nnx.Param(np.zeros(shape)) for shape in shapes]
    model = nnx.Dict(dict(zip("abc", arrays, strict=False)))
    (tensor,) = mapping(layout, sizes, len(shapes)).tensors(model)
    return tensor.solved


@pytest.mark.parametrize("case", CASES)
def test_both_directions_are_as_numpy_says(case):
    layout, shapes, expected, *sizes = CASES[case]
    found = solved(layout, shapes, *sizes)
    arrays = [rng.normal(size=shape) for shape in shapes]
    tensor = found.to_file(arrays)
    np.testing.assert_array_equal(tensor, expected(*arrays))
    assert tensor.shape == found.file_shape
    view = tensor.reshape(found.view_shape)
    for part, array in enumerate(arrays):
        for _ in range(20):
            index = tuple(_random_slice(size) for size in array.shape)
            piece = found.read(part, index, lambda i: view[i])
            np.testing.assert_array_equal(piece, array[index])


def _random_slice(size):
    start, stop = sorted(rng.integers(0, size + 1, 2))
    return slice(start, stop)


def test_only_the_wanted_elements_are_asked_for():
    asked = []

    def get(index):
        asked.append(math.prod(piece.stop - piece.start for piece in index))
        return np.zeros([piece.stop - piece.start for piece in index])

    found = solved("+(h d) e -> e h d", [(8, 4, 2), (8, 2, 2)])
    found.read(1, (slice(0, 4), slice(1, 2), slice(0, 2)), get)
    assert asked == [4 * 1 * 2]


REFUSED = {
    "o i": "needs one '->'",
    "a -> b -> c": "needs one '->'",
    "o i -> o": "'i' is on one side only",
    "a -> (a b)": "'b' is on one side only",
    "o i -> i o o": "'o' occurs twice",
    "(o i -> i o": "can't be read",
    "((o) i) -> o i": "can't be read",
    "o i -> i ~o": "belong to the left",
    "o i -> i +o": "belong to the left",
    "o -> o 2": "can't be read",
    "o i j -> (o i) j": "all but one need a size",
    "part o -> o": "need several paths",
    "+o i -> i o": "need several paths",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_has_no_inverse_is_refused(text):
    with pytest.raises(ValueError, match="is refused") as error:
        mapping(text)
    assert REFUSED[text] in str(error.value)


@pytest.mark.parametrize("text", ["o i -> i o", "+o +i -> i o", "part +o -> o"])
def test_several_arrays_need_one_place(text):
    with pytest.raises(ValueError, match="2 arrays in one tensor"):
        mapping(text, count=2)


@pytest.mark.parametrize("sizes", [{"x": 2}, {"o": 0}, {"o": 2.0}])
def test_sizes_are_of_axes_and_positive(sizes):
    with pytest.raises(ValueError, match="is of no use"):
        mapping("(o p) -> o p", sizes)


@tables.cases(
    "layout, shapes, sizes, reason",
    ("(g h) -> (h g)", [(8,)], {"g": 3}, "can't cut 8"),
    ("(g h) -> (h g)", [(3, 4)], {"g": 3}, "1 axes on its right"),
    ("+o i -> i o", [(2, 4), (3, 4)], None, r"i has the sizes \[2, 3\]"),
)
def test_shapes_that_do_not_fit(layout, shapes, sizes, reason):
    with pytest.raises(ValueError, match=reason):
        solved(layout, shapes, sizes)
