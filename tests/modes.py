"""The three modes of transforms, as keyword arguments and as parameters of tests.

A test (or a fixture) that has one of `ARGUMENTS` runs with each of its values.
"""

import itertools
import zlib

GRAPH_UPDATES = {"graph": True, "graph_updates": True}
GRAPH = {"graph": True, "graph_updates": False}
TREE = {"graph": False}

BY_NAME = {"graph_updates": GRAPH_UPDATES, "graph": GRAPH, "tree": TREE}
# The two in which only the values of Variables reach the caller.
VALUES = {"graph": GRAPH, "tree": TREE}
ARGUMENTS = {
    "mode": BY_NAME,
    "value_mode": VALUES,
    "graph_mode": {"graph_updates": GRAPH_UPDATES, "graph": GRAPH},
    "graph": {"graph": True, "tree": False},
}


def parametrize(metafunc):
    """Runs a test with each value of its arguments that are listed here."""
    given = [x.args[0] for x in metafunc.definition.iter_markers("parametrize")]
    named = {y.strip() for x in given for y in (x.split(",") if type(x) is str else x)}
    for name, values in ARGUMENTS.items():
        if name in metafunc.fixturenames and name not in named:
            metafunc.parametrize(name, values.values(), ids=values)


def by_turns(items):
    """Of the items that differ in the mode alone, one: each test has another.

    A test with other parameters runs with a quarter of them, and with an eighth of
    eight and more, which are picked without an order.
    """

    def without_mode(item):
        test, _, parameters = item.nodeid.partition("[")
        names = parameters.rstrip("]").split("-")
        return test, *(name for name in names if name not in BY_NAME)

    def number(name):
        return zlib.crc32(repr(name).encode())

    # Sorting is stable: in each group the modes stay in order.
    in_one_mode = {}
    for name, group in itertools.groupby(sorted(items, key=without_mode), without_mode):
        listed = [*group]
        in_one_mode[name] = listed[number(name) % len(listed)]
    chosen = set()
    for _, group in itertools.groupby(in_one_mode, lambda name: name[0]):
        names = sorted(group, key=number)
        step = 4 if len(names) < 8 else 8
        chosen.update(in_one_mode[name] for name in names[::step])
    return [item for item in items if item in chosen]
