"""What the rest of core does with Pytrees without going through ``setattr``."""

import copy
import inspect

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree.core import stamps
from graftree.core.objects import attributes, bookkeeping, pytrees
from graftree.core.objects.attributes import AttributeTable


class Box(nnx.Pytree):
    def __init__(self, **attributes):
        for name, value in attributes.items():
            setattr(self, name, value)


def test_items_leave_out_the_bookkeeping():
    assert bookkeeping.attribute_items(Box(b=1, a=2)) == [("b", 1), ("a", 2)]


def test_names_are_sorted_per_status():
    box = Box(b=jnp.ones(1), c="x", a=nnx.Param(1))
    names = bookkeeping.table_of(box).names(attributes.Naming())
    assert names == (("a", "b", "c"), ("a", "b"), ("c",))


def test_rebuilding_runs_nothing_and_takes_over_ownership():
    box = Box(a=1)

    @jax.jit
    def f():
        copied = pytrees.rebuild(Box, vars(box), initializing=False, is_setup=False)
        copied.a = 2
        return bookkeeping.state_of(box).is_owned(), bookkeeping.state_of(
            copied
        ).is_owned()

    assert [bool(x) for x in f()] == [False, True] and box.a == 1


def test_replacing_attributes_replaces_all():
    box = Box(a=1, b=2)
    pytrees.replace_attributes(box, AttributeTable({"c": False}), [("c", 3)])
    assert bookkeeping.attribute_items(box) == [("c", 3)]


def test_assignments_can_be_checked_without_being_made():
    box = Box(a=1)
    pytrees.check_assignment(box, "a", 2)
    with pytest.raises(ValueError, match="Cannot assign data value"):
        pytrees.check_assignment(box, "a", jnp.ones(1))
    assert box.a == 1


def test_signature_of_a_class_is_that_of_its_init():
    class Point(nnx.Pytree):
        def __init__(self, x, *, y=1): ...

    assert str(inspect.signature(Point)) == "(x, *, y=1)"


def test_objects_that_new_replaces_are_not_initialized():
    class Other:
        pass

    class Odd(nnx.Pytree):
        def __new__(cls):
            return Other()

        def __init__(self):
            raise AssertionError("not called")

    assert type(Odd()) is Other


def test_failed_assignment_changes_nothing():
    box = Box(a=1)
    table, stamp = bookkeeping.table_of(box), bookkeeping.state_of(box).stamp
    with pytest.raises(ValueError):
        box.b = [jnp.ones(1)]
    assert (
        bookkeeping.table_of(box) is table and bookkeeping.state_of(box).stamp == stamp
    )


def test_deleting_what_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError):
        del Box().missing


def test_descriptors_that_want_an_instance_are_assigned_to():
    class Halved:
        def __get__(self, obj, owner=None):
            return obj._doubled / 2

        def __set__(self, obj, value):
            obj._doubled = 2 * value

    class Holder(nnx.Pytree):
        x = Halved()

    holder = Holder()
    holder.x = 3
    assert (holder.x, holder._doubled) == (3, 6) and "x" not in vars(holder)
    with pytest.raises(AttributeError):
        del holder.x


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


class Gauge(Meter):
    pass


def set_reading(meter, value):
    meter.reading = value


def set_class(meter):
    meter.__class__ = Gauge


def fail_to_set(meter):
    with pytest.raises(ValueError, match="no reading"):
        meter.reading = None


@pytest.mark.parametrize(
    "change",
    [
        lambda meter: set_reading(meter, 2),
        lambda meter: set_reading(meter, jnp.ones(1)),
        lambda meter: delattr(meter, "reading"),
        fail_to_set,
        set_class,
    ],
)
def test_what_descriptors_do_is_stamped(change):
    """They are code of the user, which may write into ``vars`` itself."""
    meter = Meter()
    meter.reading = 1
    stamp = bookkeeping.state_of(meter).stamp
    change(meter)
    assert stamp < bookkeeping.state_of(meter).stamp <= stamps.clock.now


def test_the_base_class_has_descriptors_too():
    obj = nnx.Pytree()
    obj.__class__ = Meter
    assert type(obj) is Meter and bookkeeping.attribute_items(obj) == []


def test_descriptors_may_be_added_to_a_class_later():
    class Base(nnx.Pytree):
        pass

    class Child(Base):
        pass

    before = Child()
    before.x = 1
    Base.x = Meter.reading
    for obj in (before, Child()):
        obj.x = 3
        assert obj.x == 3 and vars(obj)["_reading"] == 3


@pytest.mark.parametrize("attributes", [{}, {"a": 1}, {"b": 2.0, "a": 1, "c": 3.0}])
def test_flattening_is_undone_whatever_there_is(attributes):
    box = Box(**{k: nnx.data(v) if v > 1 else v for k, v in attributes.items()})
    leaves, treedef = jax.tree.flatten(box)
    assert leaves == [value for value in attributes.values() if value > 1]
    copied = jax.tree.unflatten(treedef, leaves)
    assert bookkeeping.attribute_items(copied) == sorted(attributes.items())
    assert bookkeeping.table_of(copied) is bookkeeping.table_of(box)
    assert jax.tree.structure(copied) == treedef == jax.tree.structure(copy.copy(box))


def test_replacing_arrays_only_keeps_the_stamp():
    box = Box(a=jnp.ones(1), b=1)
    stamp, table = bookkeeping.state_of(box).stamp, bookkeeping.table_of(box)
    pytrees.replace_attributes(box, table, [("a", jnp.zeros(1)), ("b", 1)])
    assert bookkeeping.state_of(box).stamp == stamp
    pytrees.replace_attributes(box, table, [("a", jnp.zeros(1)), ("b", 2)])
    assert bookkeeping.state_of(box).stamp > stamp
