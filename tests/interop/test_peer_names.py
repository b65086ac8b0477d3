"""What Flax NNX returns, and its sub-modules, have no public name that we lack.

Names that are missing on purpose are in `absent_names.py`, each with its reason.
"""

import importlib
import types
import typing

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree.interop import flax_names
from tests.interop import absent_names, returned_objects

PATHS = sorted({*flax_names.MODULES, *flax_names.SAME})


def public(x):
    return [name for name in dir(x) if not name.startswith("_")]


def is_of_flax(value):
    """Whether a value of a module is Flax's, not what its file imports from others."""
    if isinstance(value, (types.ModuleType, typing.TypeVar, typing.ParamSpec)):
        return False
    if typing.get_args(value):  # an alias in the words of `typing`
        return True
    module = getattr(value, "__module__", None)
    return module is None or module.startswith("flax")


def differences(theirs, ours, is_meant, table):
    """What is missing without a reason, and what has a reason but is not missing.

    A name of the table may be missing in Flax, too: its releases differ in such names.
    """
    listed = absent_names.listed(table)
    unlisted = {
        f"{where}: {name}"
        for where, x in theirs.items()
        for name in public(x)
        if is_meant(x, name) and not hasattr(ours[where], name)
        if name not in listed.get(where, ())
    }
    outdated = {
        f"{where}: {name}"
        for where, names in listed.items()
        for name in names
        if hasattr(ours[where], name)
    }
    return unlisted, outdated


@pytest.mark.peers
def test_sub_modules_lack_no_name_that_is_not_listed():
    theirs = {path: importlib.import_module(f"flax.nnx.{path}") for path in PATHS}
    ours = {path: importlib.import_module(f"graftree.{path}") for path in PATHS}

    def is_meant(module, name):
        return is_of_flax(getattr(module, name))

    found = differences(theirs, ours, is_meant, absent_names.OF_MODULES)
    assert found == (set(), set())


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # to read `raw_value` warns
def test_returned_objects_lack_no_attribute_that_is_not_listed():
    peer = importlib.import_module("flax.nnx")
    theirs, ours = returned_objects.made(peer), returned_objects.made(nnx)
    assert theirs.keys() == ours.keys() and len(ours) > 70
    found = differences(theirs, ours, lambda x, name: True, absent_names.OF_OBJECTS)
    assert found == (set(), set())


# --------------------------------------------------- what the helpers do, as the peer's


def outcome(f, *args, **kwargs):
    try:
        return f(*args, **kwargs)
    except (TypeError, ValueError) as error:
        return type(error)


TREES = [
    (0, [1, 2]),
    ((0, 1), ({"a": 1, "b": 2}, 3)),
    ((0, 1), (3,)),
    ((0, None), ({"a": 1}, [3])),
    ([0], (1,)),
    ({"a": 1}, {"a": [2, 3]}),
]


@pytest.mark.peers
@pytest.mark.parametrize("trees", TREES, ids=str)
def test_prefixes_are_broadcast_as_by_the_peer(trees):
    peer = importlib.import_module("flax.nnx.extract")
    for module in (peer, nnx.extract):
        assert outcome(module.broadcast_prefix, *trees) == outcome(
            peer.broadcast_prefix, *trees
        )
        assert outcome(
            module.broadcast_prefix_map, lambda *x: x[1:], *trees
        ) == outcome(peer.broadcast_prefix_map, lambda *x: x[1:], *trees)
    none = lambda x: x is None  # noqa: E731
    assert outcome(
        nnx.extract.broadcast_prefix, *trees, prefix_is_leaf=none
    ) == outcome(peer.broadcast_prefix, *trees, prefix_is_leaf=none)


@pytest.mark.peers
def test_aliases_are_found_as_by_the_peer():
    peer = importlib.import_module("flax.nnx")
    found = []
    for library in (peer, nnx):
        check = library.extract.check_no_aliases
        v, w = library.Param(1.0), library.Param(1.0)
        linear = library.Linear(1, 1, rngs=library.Rngs(0))
        paths = {
            jax.tree_util.keystr(path): type(x).__name__
            for path, x in check("f", a=linear, b=[v, 1], c=jnp.ones(1)).items()
        }
        refused = outcome(check, "f", a=v, b=[v]), outcome(check, "f", a=[w], b=[v])
        found.append((paths, refused[0], len(refused[1])))
    assert found[0] == found[1] and len(found[0][0]) == 3


@pytest.mark.peers
def test_changes_and_keywords_are_told_as_by_the_peer():
    peer = importlib.import_module("flax.nnx")
    found = []
    for library in (peer, nnx):
        x = library.extract
        v = library.Param(jnp.ones(1))
        other = library.Param(jnp.zeros(1), tag="x")
        changed = [x.variable_changed(v, w) for w in (v, v.copy(), other)]
        keywords = (lambda a: 0, lambda a, **k: 0, lambda b=1, *, a: 0)
        taken = [x.filter_kwargs(f, a=1, c=2) for f in keywords]
        found.append((changed, taken))
    assert found[0] == found[1]


@pytest.mark.peers
def test_registries_know_the_same_types():
    peer = importlib.import_module("flax.nnx")
    found = []
    for library in (peer, nnx):
        graph, tree = library.graphlib.GRAPH_REGISTRY, library.graphlib.PYTREE_REGISTRY
        names = ("Module", "Linear", "Rngs", "List", "Param", "State")
        kinds = [getattr(library, name) for name in names] + [list, dict, tuple, int]
        found.append([(kind in graph, kind in tree) for kind in kinds])
    assert found[0] == found[1]


def test_registries_show_what_is_registered():
    class Node:
        pass

    graph, tree = nnx.graphlib.GRAPH_REGISTRY, nnx.graphlib.PYTREE_REGISTRY
    assert Node not in graph and nnx.Linear in [*graph] and len(graph) == len([*graph])
    nnx.graphlib.register_graph_node_type(
        Node,
        lambda node: ((), None),
        lambda node, key, value: None,
        lambda node, key: None,
        lambda metadata: Node(),
        lambda node: None,
        lambda node, items: None,
    )
    assert Node in graph and Node in [*graph]
    assert {list, tuple, dict, nnx.State} <= {*tree} and not {*tree} & {*graph}
    with pytest.raises(TypeError):
        graph[Node] = None
