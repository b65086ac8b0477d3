"""Registration of node types, and the predicates (contract section 12)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests.strategies import Block, Hidden, Moments, Pair, param

graphlib = nnx.graphlib


class Bag:
    """A graph node by registration; the attribute ``kind`` is its metadata."""

    def __init__(self, kind, **items):
        self.kind = kind
        self.items = items


graphlib.register_graph_node_type(
    Bag,
    lambda bag: (list(bag.items.items()), bag.kind),
    lambda bag, key, value: bag.items.__setitem__(key, value),
    lambda bag, key: bag.items.pop(key),
    lambda kind: Bag(kind),
    lambda bag: bag.items.clear(),
    lambda bag, items: bag.items.update(items),
)


class Row:
    """A container by registration, immutable."""

    def __init__(self, *items):
        self.items = items


graphlib.register_pytree_node_type(
    Row,
    lambda row: (list(enumerate(row.items)), None),
    lambda children, aux: Row(*[value for _, value in children]),
)


class Marked:
    """A graph node that says which children are data."""

    def __init__(self):
        self.data = 3
        self.static = 4


def children_of_marked(x):
    data, static = graphlib.DataElem(x.data), graphlib.StaticElem(x.static)
    return [("d", data), ("s", static)], None


graphlib.register_graph_node_type(
    Marked,
    children_of_marked,
    setattr,
    lambda x, key: x.__dict__.pop(key),
    lambda aux: Marked(),
    lambda x: None,
    lambda x, items: vars(x).update(items),
)


# --------------------------------------------------------------------- registered types


def test_a_registered_graph_node_is_shared():
    bag = Bag("paper", w=param(), n=3)
    bag.items["me"] = bag
    merged = nnx.merge(*nnx.split([bag, bag]))
    assert merged[0] is merged[1] and merged[0].items["me"] is merged[0]
    assert merged[0].kind == "paper" and merged[0].items["n"] == 3
    assert merged[0].items["w"] is bag.items["w"]


def test_metadata_of_a_registered_node_is_structure():
    assert nnx.graphdef(Bag("b")) != nnx.graphdef(Bag("a")) == nnx.graphdef(Bag("a"))


def test_registered_nodes_are_updated_popped_and_listed():
    bag = Bag("paper", b=param(), a=nnx.BatchStat(jnp.ones(1)))
    nnx.update(bag, {"b": jnp.zeros(2), "c": jnp.ones(1)})
    assert bag.items["b"][...].tolist() == [0.0, 0.0] and "c" in bag.items
    assert list(nnx.pop(bag, nnx.BatchStat)) == ["a"] and "a" not in bag.items
    assert [path for path, _ in nnx.iter_graph(bag)] == [("b",), ("c",), ()]


def test_marked_children():
    graphdef, state = nnx.split(Marked())
    assert state == nnx.State({"d": 3})
    merged = nnx.merge(graphdef, {"d": 5})
    assert (merged.d, merged.s) == (5, 4)


def test_a_registered_node_that_is_no_pytree_is_a_leaf_in_tree_mode():
    bag = Bag("paper", w=param())
    assert nnx.state([bag], graph=False) == nnx.State({0: bag})


def test_registered_containers_are_rebuilt_and_immutable():
    row = Row(param(), jnp.ones(1), 3)
    graphdef, state = nnx.split([row, row])
    merged = nnx.merge(graphdef, state)
    assert merged[0] is not merged[1] and merged[0].items[0] is merged[1].items[0]
    assert merged[0].items[2] == 3
    nnx.update(row, {0: jnp.zeros(2)})
    assert row.items[0][...].tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="Cannot set key 1"):
        nnx.update(row, {1: jnp.zeros(1)})
    with pytest.raises(ValueError, match="Cannot pop key 0"):
        nnx.pop(row, nnx.Param)


@pytest.mark.parametrize("kind", [Bag, Row, Block, nnx.Rngs, list, dict])
def test_types_are_registered_once(kind):
    with pytest.raises(ValueError, match="is already registered"):
        graphlib.register_graph_node_type(kind, *[None] * 6)
    with pytest.raises(ValueError, match="is already registered"):
        graphlib.register_pytree_node_type(kind, None, None)


# --------------------------------------------------------------------------- predicates

PREDICATES = (
    graphlib.is_node,
    graphlib.is_graph_node,
    graphlib.is_node_module,
    graphlib.is_pytree_node,
    graphlib.is_node_leaf,
)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([Block(), Hidden(), nnx.Rngs(0), nnx.List(), Bag("a")], "TTTFF"),
        ([param(), nnx.Param(jnp.ones(1), ref=True)], "FTFFT"),
        ([jax.new_ref(jnp.ones(1))], "FTFFT"),
        ([[], {}, (), None, nnx.State({}), Moments(1, 2), Pair(1, 2), Row()], "TFFTF"),
        ([jnp.ones(1), np.ones(1), jax.random.key(0)], "FFFFT"),
        ([3, "text", jax.ShapeDtypeStruct((), jnp.float32), object()], "FFFFF"),
    ],
)
def test_predicates(values, expected):
    for x in values:
        found = "".join("FT"[predicate(x)] for predicate in PREDICATES)
        assert found == expected, type(x)


def test_pytrees_count_as_pytree_nodes_on_request():
    nodes = Block(), Hidden(), Bag("a")
    found = [graphlib.is_pytree_node(x, check_graph_registry=False) for x in nodes]
    assert found == [True, False, False]


def test_predicates_of_types():
    found = [graphlib.is_node_type(kind) for kind in (Block, list, nnx.Param, int)]
    assert found == [True, True, False, False]
    assert graphlib.get_node_impl(Block()) is graphlib.get_node_impl_for_type(Block)
    assert graphlib.get_node_impl(param()) is None


def test_traced_values_are_classified_as_what_they_stand_for():
    seen = []

    def f(x):
        traced = x, jax.new_ref(x)
        seen.extend(
            (graphlib.is_node_leaf(v), graphlib.is_graph_node(v)) for v in traced
        )

    jax.jit(f)(jnp.ones(1))
    assert seen == [(True, False), (True, True)]


class Labeled:
    """A container whose making looks into what it contains."""

    def __init__(self, module):
        self.module = module
        self.label = module.name


graphlib.register_pytree_node_type(
    Labeled,
    lambda x: ([("m", x.module)], None),
    lambda items, aux: Labeled(items[0][1]),
)


def test_containers_are_made_around_complete_nodes():
    merged = nnx.merge(*nnx.split(Block(held=nnx.data(Labeled(Block(name="inner"))))))
    assert merged.held.label == "inner"
