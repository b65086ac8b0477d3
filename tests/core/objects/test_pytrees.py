"""Pytrees: signatures, assignments that fail, descriptors, flattening."""

import copy
import inspect

import jax
import numpy as np
import pytest

import graftree as nnx
from tests import tables, zoo


def test_signature_of_a_class_is_that_of_its_init():
    class Point(nnx.Pytree):
        def __init__(self, x, *, y=1): ...

    assert str(inspect.signature(Point)) == "(x, *, y=1)"


def test_objects_that_new_replaces_are_not_initialized():
    class Odd(nnx.Pytree):
        def __new__(cls):
            return 3

        def __init__(self):
            raise AssertionError("not called")

    assert Odd() == 3


def test_failed_assignment_changes_nothing():
    node = zoo.Node(a=1)
    graphdefs = [nnx.graphdef(node) for _ in range(3)]
    with pytest.raises(ValueError):
        node.b = [np.ones(1)]
    assert dict(node._pytree__nodes) == {"a": False} and not hasattr(node, "b")
    assert nnx.graphdef(node) is graphdefs[-1]


def test_descriptors_that_want_an_instance_are_assigned_to():
    class Halved:
        def __get__(self, obj, owner=None):
            return obj._doubled / 2

        def __set__(self, obj, value):
            obj._doubled = 2 * value

    holder = type("Holder", (nnx.Pytree,), {"x": Halved()})()
    holder.x = 3
    assert (holder.x, holder._doubled) == (3, 6) and "x" not in vars(holder)
    for name in ("x", "missing"):
        with pytest.raises(AttributeError):
            delattr(holder, name)


class Meter(nnx.Pytree):
    def __init__(self):
        self.unit = "m"

    @property
    def reading(self):
        return vars(self)["_reading"]

    @reading.setter
    def reading(self, value):
        vars(self)["_reading"] = value
        if value is None:
            raise ValueError("no reading")

    @reading.deleter
    def reading(self):
        del vars(self)["_reading"]


def fail_to_set(meter):
    with pytest.raises(ValueError, match="no reading"):
        meter.reading = None


@tables.cases(
    "change",
    lambda meter: setattr(meter, "reading", 2),
    lambda meter: setattr(meter, "reading", np.ones(1)),
    lambda meter: delattr(meter, "reading"),
    fail_to_set,
    lambda meter: setattr(meter, "__class__", zoo.Node),
)
def test_what_descriptors_do_is_seen(change):
    """They are code of the user, which may write into ``vars`` itself."""
    meter = Meter()
    meter.reading = 1
    graphdefs = [nnx.graphdef(meter) for _ in range(3)]
    change(meter)
    assert nnx.graphdef(meter) is not graphdefs[-1]
    merged = nnx.merge(*nnx.split(meter))
    assert type(merged) is type(meter)
    assert vars(merged).get("_reading") is vars(meter).get("_reading")


def test_the_base_class_has_descriptors_too():
    obj = nnx.Pytree()
    obj.__class__ = Meter
    assert type(obj) is Meter and repr(obj) == "Meter()"


def test_descriptors_may_be_added_to_a_class_later():
    base = type("Base", (nnx.Pytree,), {})
    child = type("Child", (base,), {})
    before = child()
    before.x = 1
    base.x = Meter.reading
    for obj in (before, child()):
        obj.x = 3
        assert obj.x == 3 and vars(obj)["_reading"] == 3


@pytest.mark.parametrize("statuses", [{}, {"b": True}, {"b": False}])
@pytest.mark.parametrize("more", [{}, {"c": True, "a": False, "d": False}])
def test_flattening_is_undone_whatever_there_is(statuses, more):
    statuses = {**more, **statuses}
    marks = {True: nnx.data, False: nnx.static}
    node = zoo.Node(**{n: marks[is_data](n) for n, is_data in statuses.items()})
    leaves, treedef = jax.tree.flatten(node)
    assert leaves == [name for name in sorted(statuses) if statuses[name]]
    copied = jax.tree.unflatten(treedef, leaves)
    assert copied._pytree__nodes == node._pytree__nodes
    assert dict(copied._pytree__nodes) == statuses
    assert [*vars(copied).items()][2:] == [(name, name) for name in sorted(statuses)]
    assert jax.tree.structure(copied) == treedef == jax.tree.structure(copy.copy(node))
