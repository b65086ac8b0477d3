"""What owns the metadata of Variables."""

import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree.core.variables import labels
from graftree.core.variables.metadata import HashableMapping


def test_plain_variables_share_one_mapping():
    first, second = nnx.Param(jnp.ones(2)), nnx.BatchStat(jnp.ones(3))
    assert labels.metadata_of(first) is labels.metadata_of(second)


def test_replacing_metadata_moves_the_stamp_and_leaves_other_variables_alone():
    first, second = nnx.Param(1), nnx.Param(1)
    before = labels.stamp_of(first)
    labels.replace_metadata(
        first, HashableMapping({**labels.metadata_of(first), "tag": "x"})
    )
    assert labels.stamp_of(first) > before
    assert first.tag == "x"
    assert not second.has_metadata("tag")


def test_metadata_of_read_only_variables_may_change():
    variable = nnx.with_vars(nnx.Param(1), mutable=False)
    assert labels.is_read_only(variable)
    variable.set_metadata(tag="x")
    assert variable.tag == "x" and labels.is_read_only(variable)


def test_entry_mutable_is_false_or_says_nothing():
    assert not labels.is_read_only(nnx.Param(1))
    assert not labels.is_read_only(nnx.Param(1, mutable=True))
    assert labels.is_read_only(nnx.Param(1, mutable=False))


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        (nnx.Param(1, mutable=False), ("read-only", "mutable=True")),
        (nnx.Param(1, hijax=True), ("would be lost", "ref=True")),
    ],
)
def test_error_names_type_path_and_way_out(variable, words):
    message = str(labels.immutable_error(variable, "a/b"))
    assert all(word in message for word in ("Param", "at a/b", *words))
