"""Initializers are those of JAX, all of them."""

import jax
import pytest

from graftree.nn import initializers

THEIRS = {name for name in dir(jax.nn.initializers) if not name.startswith("_")}


@pytest.mark.parametrize("name", sorted(THEIRS - {"Initializer"}))
def test_initializers_are_those_of_jax(name):
    assert getattr(initializers, name) is getattr(jax.nn.initializers, name)
    assert name in initializers.__all__
