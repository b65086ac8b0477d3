"""States are matched to a skeleton by path."""

import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree.core.graph import merging


class Model(nnx.Module):
    def __init__(self):
        self.a = nnx.Param(jnp.array(1.0))
        self.b = nnx.data([nnx.Param(jnp.array(float(i))) for i in range(12)])


GRAPHDEF, STATE = nnx.split(Model())


def values(leaves):
    return [
        float(leaf if not hasattr(leaf, "get_value") else leaf[...]) for leaf in leaves
    ]


def test_states_may_come_in_any_order():
    params, rest = nnx.split_state(STATE, nnx.PathContains("b"), ...)
    expected = values(merging.match(GRAPHDEF, [STATE]))
    assert values(merging.match(GRAPHDEF, [params, rest])) == expected
    assert values(merging.match(GRAPHDEF, [rest, params])) == expected


def test_integer_keys_may_be_strings_beyond_nine():
    pure = {"a": 1.0, "b": {str(i): float(i) for i in range(12)}}
    assert values(merging.match(GRAPHDEF, [pure])) == [1.0, *map(float, range(12))]


@pytest.mark.parametrize(
    ("state", "phrase"),
    [
        ({"a": 1.0}, "missing: b/0"),
        ({"a": 1.0, "b": dict.fromkeys(range(12), 0.0), "c": 1}, "unexpected: c"),
        ({"x": 1.0, "b": dict.fromkeys(range(12), 0.0)}, "unexpected: x"),
    ],
)
def test_wrong_paths_are_named(state, phrase):
    with pytest.raises(ValueError, match=phrase):
        merging.match(GRAPHDEF, [state])


def test_counts_are_named_if_they_differ():
    with pytest.raises(
        ValueError, match="Incorrect number of leaves: expected 13, got 26"
    ):
        merging.match(GRAPHDEF, [STATE, STATE])
    with pytest.raises(ValueError, match="Incorrect number of leaves"):
        merging.match(GRAPHDEF, [[1, 2]])


def test_a_dict_may_be_the_value_of_a_variable():
    variable = nnx.Variable({"x": 1, "y": 2})
    graphdef, _ = nnx.split({"v": variable})
    (leaf,) = merging.match(graphdef, [{"v": {"x": 3, "y": 4}}])
    assert leaf == {"x": 3, "y": 4}


@pytest.mark.parametrize("root", [jnp.array(1.0), nnx.Param(jnp.array(1.0))])
def test_a_single_leaf_comes_back_from_a_flat_state(root):
    # Issue 12: the FlatState itself was taken for the leaf.
    graphdef, flat = nnx.graphlib.flatten(root)
    assert nnx.merge(graphdef, flat) is root
    with pytest.raises(ValueError, match="unexpected: a"):
        nnx.merge(graphdef, nnx.FlatState([(("a",), root)], sort=True))
