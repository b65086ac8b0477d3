"""Errors that say several things, and that leave all as it was."""

import contextlib

import jax
import numpy as np
import pytest

import graftree as nnx
from tests import catalog


@contextlib.contextmanager
def refused(error, *phrases):
    """Expects an error of this class that says all of these texts, or its notes do."""
    with pytest.raises(error) as caught:
        yield caught
    said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    for phrase in phrases:
        assert phrase in said, said


@contextlib.contextmanager
def unchanged(*nodes):
    """Expects graph nodes to have the structure and the values that they had before."""
    before = [*map(_contents, nodes)]
    yield
    for node, (graphdef, values) in zip(nodes, before, strict=True):
        now, found = _contents(node)
        assert now == graphdef
        for one, other in zip(found, values, strict=True):
            np.testing.assert_array_equal(one, other)


def _contents(node):
    graphdef, state = nnx.split(node, graph=True)
    leaves = [x[...] if isinstance(x, jax.Ref) else x for x in jax.tree.leaves(state)]
    return graphdef, [catalog.raw(x) for x in leaves]
