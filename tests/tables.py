"""Tests with parameters: tables of cases, and crosses of them."""

import zlib
from collections import defaultdict

import pytest

from tests import modes


def cases(names, *rows, **options):
    """Runs a test with each row of a table; names and options are those of pytest."""
    return pytest.mark.parametrize(names, rows, **options)


def out_of_turn(items):
    """The items that are not needed for each value of crossed parameters to be run.

    For each value of the longest parameter one item is: the values of the others take
    turns beside it, in each mode in another order. A long table without others takes
    turns with the modes.
    """
    known = defaultdict(dict)
    places = {item: [*_places(item, known)] for item in items}
    return [item for item in items if not _is_in_turn(item, places[item])]


def _places(item, known):
    """For each table of parameters its rows so far, and the number of the item's."""
    test, _, _ = item.nodeid.partition("[")
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        names = names.split(",") if isinstance(names, str) else names
        names = tuple(name.strip() for name in names)
        if not modes.ARGUMENTS.keys() & names:
            rows = known[test, names]
            row = tuple(id(item.callspec.params[name]) for name in names)
            yield rows, rows.setdefault(row, len(rows))


# Rows of a table, of which each is enough in one mode.
_MANY = 40


def _is_in_turn(item, places):
    if not places:
        return True
    (longest, turn), *others = sorted(places, key=lambda x: -len(x[0]))
    for name, values in modes.ARGUMENTS.items():
        mode = item.callspec.params.get(name)
        if mode in values.values():
            turn += [*values.values()].index(mode)
            if not others and len(longest) >= _MANY:
                return turn % len(values) == 0
    return all(place == turn % len(rows) for rows, place in others)


def beyond_a_part(items):
    """All items but a quarter of each test, an eighth of eight and more.

    They are picked without an order.
    """
    by_test = defaultdict(list)
    for item in sorted(items, key=lambda item: zlib.crc32(item.nodeid.encode())):
        by_test[item.nodeid.partition("[")[0]].append(item)
    return [
        item
        for group in by_test.values()
        for i, item in enumerate(group)
        if i % (4 if len(group) < 8 else 8)
    ]
