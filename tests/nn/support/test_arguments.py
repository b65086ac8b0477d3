"""Sizes, axes and padding in all the forms that users write."""

import numpy as np
import pytest

from graftree.nn.support import arguments


@pytest.mark.parametrize("values", [3, np.int64(3), [3], (3,), np.array([3])])
def test_sizes_takes_ints_and_sequences(values):
    assert arguments.sizes(values) == (3,)
    assert type(arguments.sizes(values)[0]) is int


@pytest.mark.parametrize("values", ["ab", 1.5, [1.5]])
def test_sizes_refuses_what_is_no_int(values):
    with pytest.raises(TypeError):
        arguments.sizes(values)


def test_per_axis_repeats_an_int_and_takes_none_for_one():
    assert arguments.per_axis(None, 2) == (1, 1)
    assert arguments.per_axis(np.int64(3), 2) == (3, 3)
    assert arguments.per_axis([3, 4], 2) == (3, 4)


def test_axes_are_made_non_negative_and_sorted():
    assert arguments.canonical_axes((-1, 0, 2), 3) == (0, 2)
    assert arguments.canonical_axes(-2, 3) == (1,)


@pytest.mark.parametrize("error", [ValueError, IndexError])
def test_axes_that_do_not_exist_are_refused(error):
    with pytest.raises(error, match="out of bounds"):
        arguments.canonical_axes((0, 3), 3)


def test_padding_gets_the_forms_of_lax():
    assert arguments.canonicalize_padding("ANY", 2) == "ANY"
    assert arguments.canonicalize_padding(2, 2) == [(2, 2), (2, 2)]
    assert arguments.canonicalize_padding([1, (0, 2)], 2) == [(1, 1), (0, 2)]
    assert arguments.canonicalize_padding(np.ones((2, 2), int), 2) == [(1, 1), (1, 1)]


@pytest.mark.parametrize("padding", [(1, 2, 3), (1, (1, 2, 3)), 1.5, None, ("a", 1)])
def test_unknown_padding_is_named(padding):
    with pytest.raises(ValueError, match="Invalid padding format.*len 2"):
        arguments.canonicalize_padding(padding, 2)


def test_if_set_leaves_out_what_is_none():
    assert arguments.if_set(a=None, b=False, c=1) == {"b": False, "c": 1}
