"""``nnx.initializers`` (contract, section 4)."""

import inspect

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx

NAMES = (
    "constant delta_orthogonal glorot_normal glorot_uniform he_normal he_uniform"
    " kaiming_normal kaiming_uniform lecun_normal lecun_uniform normal ones orthogonal"
    " truncated_normal uniform variance_scaling xavier_normal xavier_uniform zeros"
).split()


@pytest.mark.parametrize("name", NAMES)
def test_initializers_are_the_objects_of_jax(name):
    assert getattr(nnx.initializers, name) is getattr(jax.nn.initializers, name)


def test_factories_of_ones_and_zeros_give_these_themselves():
    assert nnx.initializers.zeros_init() is nnx.initializers.zeros
    assert nnx.initializers.ones_init() is nnx.initializers.ones


@pytest.mark.parametrize(("name", "value"), [("ones", 1.0), ("zeros", 0.0)])
def test_ones_and_zeros_are_initializers(name, value):
    init = getattr(nnx.initializers, name)
    assert [*inspect.signature(init).parameters] == [
        "key", "shape", "dtype", "out_sharding",
    ]  # fmt: skip
    assert init(None, (2,), jnp.bfloat16).tolist() == [value, value]


def test_the_type_alias_has_two_names():
    assert nnx.Initializer is nnx.initializers.Initializer
