"""Axis rules and specs; the contract tests place arrays."""

import threading

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import graftree as nnx
from graftree.core.variables import sharding


def test_rules_of_a_context_replace_those_outside():
    with nnx.logical_axis_rules((("a", "x"),)):
        with nnx.logical_axis_rules((("b", "y"),)):
            assert sharding.get_logical_axis_rules() == (("b", "y"),)
        assert sharding.get_logical_axis_rules() == (("a", "x"),)
    assert sharding.get_logical_axis_rules() == ()


def test_rules_belong_to_a_thread():
    seen = []
    with nnx.logical_axis_rules((("a", "x"),)):
        thread = threading.Thread(
            target=lambda: seen.append(sharding.get_logical_axis_rules())
        )
        thread.start()
        thread.join()
    assert seen == [()]


def test_rules_are_joined_unless_they_contradict():
    joined = sharding.composite_rules((("a", "x"),), (("b", None), ("a", "x")))
    assert dict(joined) == {"a": "x", "b": None}
    with pytest.raises(ValueError, match=r"(?s)'a'.*'x'|'a'.*'y'"):
        sharding.composite_rules((("a", "x"),), (("a", "y"),))


@pytest.mark.parametrize(
    ("annotation", "spec"),
    [
        (("a", "b"), P("x", None)),
        (["a", "other"], P("x", "other")),
        ((("a", "z"), None), P(("x", "z"), None)),
        (P("a"), P("x")),
    ],
    ids=str,
)
def test_names_are_mapped_and_unknown_ones_kept(annotation, spec):
    assert sharding.get_pspec(annotation, (("a", "x"), ("b", None))) == spec


def test_bare_string_is_no_annotation():
    with pytest.raises(TypeError, match="'x'"):
        sharding.get_pspec("x")


def test_spec_of_a_named_sharding_is_its_own():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    assert sharding.get_pspec(NamedSharding(mesh, P("x"))) == P("x")


def test_value_of_one_device_gets_on_the_mesh_inside_a_gradient():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    value = jax.device_put(np.ones(8, np.float32), jax.devices()[2])

    def loss(scale):
        return (nnx.Param(value, out_sharding=("x",))[...] * scale).sum()

    with jax.set_mesh(mesh):
        assert jax.grad(loss)(1.0) == 8.0


def test_rules_in_metadata_are_pairs():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh), pytest.raises(TypeError, match="pairs of a name"):
        nnx.Param(np.ones(8), out_sharding=("embed",), sharding_rules=["embed"])
