"""What is assigned to the leaves of an object."""

import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree.transforms import prefixes


def test_diff_state_is_a_frozen_pair():
    target = nnx.DiffState(0, nnx.Param)
    assert (target.argnum, target.filter) == (0, nnx.Param)
    assert target == nnx.DiffState(0, nnx.Param) and hash(target) is not None
    with pytest.raises(AttributeError):
        target.argnum = 1
    assert isinstance(target, prefixes.PrefixMapping)


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (nnx.Param, [True, False]),
        ("tagged", [False, True]),
        (nnx.PathContains("a"), [True, False]),
        ((nnx.Param, nnx.BatchStat), [True, True]),
        (..., [True, True]),
    ],
    ids=str,
)
def test_diff_state_maps_leaves_by_its_filter(chosen, expected):
    leaves = {
        ("a",): nnx.Param(jnp.array(1.0)),
        ("b",): nnx.BatchStat(jnp.array(1.0), tag="tagged"),
    }
    target = nnx.DiffState(0, chosen)
    assert [target.map_prefix(path, leaf) for path, leaf in leaves.items()] == expected
