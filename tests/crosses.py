"""Tests with several parameters, which are run with all pairs of values."""

from collections import defaultdict


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
