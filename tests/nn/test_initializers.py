"""Initializers are those of JAX."""

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree.nn import initializers

OWN = {"Initializer", "ones_init", "zeros_init"}


@pytest.mark.parametrize("name", sorted(set(initializers.__all__) - OWN))
def test_initializers_are_those_of_jax(name):
    assert getattr(nnx.initializers, name) is getattr(jax.nn.initializers, name)


def test_all_initializers_of_jax_are_there():
    theirs = {n for n in dir(jax.nn.initializers) if not n.startswith("_")}
    assert theirs <= set(initializers.__all__)


def test_ones_init_and_zeros_init_return_the_initializers_themselves():
    assert nnx.initializers.zeros_init() is nnx.initializers.zeros
    assert nnx.initializers.ones_init() is nnx.initializers.ones


def test_ones_and_zeros_fill_the_shape():
    key = jax.random.key(0)
    assert nnx.initializers.ones(key, (2, 3), jnp.bfloat16).sum() == 6
    assert nnx.initializers.zeros(key, (2, 3), jnp.bfloat16).sum() == 0


def test_the_type_alias_has_two_names():
    assert nnx.Initializer is nnx.initializers.Initializer
