"""What owns the metadata of Variables."""

import jax.numpy as jnp

import graftree as nnx
from graftree.core import labels
from graftree.core.metadata import HashableMapping


def test_plain_variables_share_one_mapping():
    first, second = nnx.Param(jnp.ones(2)), nnx.BatchStat(jnp.ones(3))
    assert labels.metadata_of(first) is labels.metadata_of(second)


def test_replacing_metadata_moves_the_stamp_and_leaves_other_variables_alone():
    first, second = nnx.Param(1), nnx.Param(1)
    before = first.stamp
    labels.replace_metadata(
        first, HashableMapping({**labels.metadata_of(first), "tag": "x"})
    )
    assert first.stamp > before
    assert first.tag == "x"
    assert not second.has_metadata("tag")


def test_hooks_are_looked_up_by_name():
    assert nnx.Param(1).get_hooks("on_get_value") is None
