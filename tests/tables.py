"""Tests with parameters: tables of cases, and crosses, which are run with all pairs."""

from collections import defaultdict

import pytest


def cases(names, *rows, **options):
    """Runs a test with each row of a table; names and options are those of pytest."""
    return pytest.mark.parametrize(names, rows, **options)


def repeated(items):
    """The items whose values all occur in earlier items of the same test and mode."""
    known = defaultdict(set)
    found = []
    for item in items:
        if len([*item.iter_markers("parametrize")]) < 2:
            continue
        values = {name: repr(value) for name, value in item.callspec.params.items()}
        test = item.nodeid.partition("[")[0], values.pop("mode", None)
        if values.items() <= known[test]:
            found.append(item)
        known[test] |= values.items()
    return found
