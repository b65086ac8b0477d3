"""What differs between two structures is told by path."""

import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree.core.graph import differences
from graftree.core.graph.flattening import flatten_graph


class Model(nnx.Module):
    def __init__(self):
        self.rate = 0.5
        self.weight = nnx.Param(jnp.ones(2), tag="x")
        self.parts = nnx.List([nnx.Param(jnp.ones(1))])


def lines(change, graph=True):
    """How a model differs from a changed one."""
    model = Model()
    change(model)
    pair = [nnx.graphdef(x, graph=graph) for x in (Model(), model)]
    found = differences.between(*map(differences.facts, pair))
    return differences.in_words(found, "before", "after")


CHANGES = {
    "rate: 0.5 before, 1.0 after": lambda m: setattr(m, "rate", 1.0),
    "rate: 0.5 before, nothing after": lambda m: delattr(m, "rate"),
    "new: nothing before, an array after": lambda m: setattr(m, "new", jnp.ones(1)),
    "parts/0: a Param before, a BatchStat after": lambda m: m.parts.__setitem__(
        0, nnx.BatchStat(1)
    ),
    "weight, metadata 'tag': 'x' before, 'y' after": lambda m: m.weight.set_metadata(
        tag="y"
    ),
    "weight: a Param before, a Model after": lambda m: setattr(m, "weight", Model()),
    "z: nothing before, a known object: weight after": lambda m: setattr(
        m, "z", m.weight
    ),
}


@pytest.mark.parametrize("line", CHANGES)
def test_a_change_is_one_line_that_says_where_and_what(line):
    assert lines(CHANGES[line]) == [line]


def test_no_change_is_no_line():
    for graph in (True, False):
        assert lines(lambda m: m.weight.set_value(jnp.zeros(2)), graph) == []


def test_values_that_python_takes_for_equal_differ():
    assert lines(lambda m: setattr(m, "rate", 0.5)) == []
    first, second = ({("a",): differences.Static(x)} for x in (1, True))
    assert len(differences.between(first, second)) == 1


def test_trees_differ_in_their_leaves_too():
    changed = lines(lambda m: m.parts.append(nnx.Param(1)), graph=False)
    assert any("parts/1: nothing before, a Param after" in line for line in changed)


def test_leaves_count_by_identity_where_they_are_given():
    model = Model()
    before = differences.facts(*flatten_graph(model))
    model.weight.set_metadata(tag="y")
    assert differences.between(before, differences.facts(*flatten_graph(model))) == []
    model.weight = nnx.Param(jnp.ones(2))
    (found,) = differences.between(before, differences.facts(*flatten_graph(model)))
    assert found.path == ("weight",)


def test_long_lists_end_with_their_number():
    missing = [(i,) for i in range(12)]
    listed = differences.missing_and_unexpected(missing, [("a", "b")])
    assert listed[0] == "  missing: 0" and listed[-1] == "  unexpected: a/b"
    assert "  ... and 2 more" in listed
