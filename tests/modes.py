"""The three modes of transforms, as keyword arguments and as parameters of tests."""

import itertools
import zlib

import pytest

GRAPH_UPDATES = {"graph": True, "graph_updates": True}
GRAPH = {"graph": True, "graph_updates": False}
TREE = {"graph": False}

BY_NAME = {"graph_updates": GRAPH_UPDATES, "graph": GRAPH, "tree": TREE}
MODES = pytest.mark.parametrize("mode", BY_NAME.values(), ids=BY_NAME)
# The two in which only the values of Variables reach the caller.
VALUE_MODES = pytest.mark.parametrize("mode", [GRAPH, TREE], ids=["graph", "tree"])


def by_turns(items):
    """Of the items that differ in the mode alone, one: each test has another."""

    def without_mode(item):
        test, _, parameters = item.nodeid.partition("[")
        names = parameters.rstrip("]").split("-")
        return test, *(name for name in names if name not in BY_NAME)

    # Sorting is stable: in each group the modes stay in order.
    groups = itertools.groupby(sorted(items, key=without_mode), without_mode)
    chosen = set()
    for name, group in groups:
        listed = [*group]
        chosen.add(listed[zlib.crc32(repr(name).encode()) % len(listed)])
    return [item for item in items if item in chosen]
