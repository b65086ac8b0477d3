"""Trees: no shared references, no cycles; the reports."""

import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree.core.graph import tree_checks


def test_duplicates_are_reported_with_both_paths_and_the_ways_out():
    shared = nnx.Param(jnp.ones(2))
    with pytest.raises(ValueError) as error:
        nnx.split(nnx.Dict(a=shared, b=nnx.Dict(c=shared)), graph=False)
    text = str(error.value)
    assert text.startswith("Duplicate Param") and "found at paths" in text
    assert "  - .a\n  - .b.c" in text
    assert "does not support shared references" in text
    for way_out in ("nnx.clone", "nnx.split(..., graph=True)", "nnx.compat.split"):
        assert way_out in text


def test_shared_arrays_are_no_duplicates():
    array = jnp.ones(2)
    assert len(nnx.state(nnx.Dict(a=array, b=array), graph=False)) == 2


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_cycles_are_found_without_overflowing_the_stack(depth):
    root = node = nnx.Dict()
    for _ in range(depth - 1):
        node.a = nnx.Dict()
        node = node.a
    node.a = root
    with pytest.raises(ValueError, match="(?s)Cycle.*Dict.*found at paths.*<root>"):
        nnx.split(root, graph=False)


def test_cycles_through_lists_are_found():
    items = [1]
    items.append(items)
    with pytest.raises(ValueError, match="Cycle"):
        tree_checks.flatten(items)


def test_node_met_twice_is_no_cycle():
    leaf = nnx.Dict(x=jnp.ones(1))
    tree_checks.flatten([leaf, leaf])
    assert len(nnx.state([leaf, leaf], graph=False)) == 2


def test_deep_trees_are_no_cycles():
    node = nnx.Dict(x=nnx.Param(1))
    for _ in range(60):
        node = nnx.Dict(a=node)
    assert len(nnx.graphdef(node, graph=False).paths()[0]) == 61
