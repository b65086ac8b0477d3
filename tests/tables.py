"""Tests with parameters: tables of cases, and crosses of them."""

import pytest

from tests import modes


def cases(names, *rows, **options):
    """Runs a test with each row of a table; names and options are those of pytest."""
    return pytest.mark.parametrize(names, rows, **options)


def out_of_turn(items):
    """The items that are not needed for each value of crossed parameters to be run.

    For each value of the longest parameter one item is: the values of the others take
    turns beside it, in each mode in another order.
    """
    return [item for item in items if not _is_in_turn(item)]


def _is_in_turn(item):
    axes = []
    for mark in item.iter_markers("parametrize"):
        names, values = mark.args
        first = (names.split(",") if isinstance(names, str) else names)[0].strip()
        if first not in modes.ARGUMENTS:
            axes.append((len(values), item.callspec.indices[first]))
    if len(axes) < 2:
        return True
    axes.sort(key=lambda axis: -axis[0])
    turn = axes[0][1] + sum(item.callspec.indices.get(x, 0) for x in modes.ARGUMENTS)
    return all(place == turn % size for size, place in axes[1:])
