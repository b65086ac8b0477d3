"""The three modes of transforms, as keyword arguments and as parameters of tests."""

import pytest

GRAPH_UPDATES = {"graph": True, "graph_updates": True}
GRAPH = {"graph": True, "graph_updates": False}
TREE = {"graph": False}

BY_NAME = {"graph_updates": GRAPH_UPDATES, "graph": GRAPH, "tree": TREE}
MODES = pytest.mark.parametrize("mode", BY_NAME.values(), ids=BY_NAME)
# The two in which only the values of Variables reach the caller.
VALUE_MODES = pytest.mark.parametrize("mode", [GRAPH, TREE], ids=["graph", "tree"])
