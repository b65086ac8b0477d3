"""What differs between two structures is told by path: here, those of two branches."""

import re

import jax.numpy as jnp
import pytest

import graftree as nnx
from tests import zoo


def model():
    return zoo.Box(
        rate=0.5,
        weight=nnx.Param(jnp.ones(2), tag="x"),
        parts=nnx.List([nnx.Param(jnp.ones(1))]),
    )


def lines(change, graph=True):
    """How a model differs from a changed one."""

    def changed():
        other = model()
        change(other)
        return other

    try:
        nnx.cond(True, model, changed, graph=graph)
    except TypeError as error:
        return re.findall("^  - out(.*)", str(error), re.MULTILINE)
    return []


CHANGES = {
    ".rate: 0.5 in true_fun, 1.0 in false_fun": lambda m: setattr(m, "rate", 1.0),
    ".rate: 0.5 in true_fun, nothing in false_fun": lambda m: delattr(m, "rate"),
    ".new: nothing in true_fun, an array in false_fun": lambda m: setattr(
        m, "new", jnp.ones(1)
    ),
    ".parts[0]: a Param in true_fun, a BatchStat in false_fun": lambda m: (
        m.parts.__setitem__(0, nnx.BatchStat(jnp.ones(1)))
    ),
    ".weight, metadata 'tag': 'x' in true_fun, 'y' in false_fun": lambda m: (
        m.weight.set_metadata(tag="y")
    ),
    ".weight: a Param in true_fun, a Box in false_fun": lambda m: setattr(
        m, "weight", model()
    ),
    ".z: nothing in true_fun, a known object: out/weight in false_fun": lambda m: (
        setattr(m, "z", m.weight)
    ),
}


@pytest.mark.parametrize("line", CHANGES)
def test_a_change_is_one_line_that_says_where_and_what(line):
    assert lines(CHANGES[line]) == [line]


def test_no_change_is_no_line(graph):
    assert lines(lambda m: m.weight.set_value(jnp.zeros(2)), graph) == []


def test_values_that_python_takes_for_equal_differ():
    assert lines(lambda m: setattr(m, "rate", float("0.5"))) == []
    with pytest.raises(TypeError, match=r"out.k: 1 in true_fun, True in false_fun"):
        nnx.cond(True, lambda: zoo.Box(k=1), lambda: zoo.Box(k=True))


def test_trees_differ_in_their_leaves_too():
    changed = lines(lambda m: m.parts.append(nnx.Param(jnp.ones(1))), graph=False)
    assert any("parts[1]: nothing in true_fun, a Param" in line for line in changed)
