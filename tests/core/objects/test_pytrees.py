"""Pytrees: signatures, assignments that fail, descriptors; classes that change."""

import copy
import inspect
import pickle

import jax
import jax.numpy as jnp
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


# ------------------------------------------------------------------ classes that change


def test_declaration_may_be_repeated():
    class First(nnx.Pytree):
        a: object = nnx.data()

    class Second(First):
        a: list = nnx.data()

    obj = Second()
    obj.a = [jnp.ones(1)]
    assert len(jax.tree.leaves(obj)) == 1


class Base(nnx.Module):
    def __new__(cls, kind=None):
        return super().__new__(Derived if cls is Base else cls)

    def __init__(self, kind):
        self.kind = "base"


class Derived(Base):
    def __init__(self, kind):
        self.kind = kind
        self.w = nnx.Param(jnp.ones(2))


def test_init_is_that_of_the_class_which_new_chose():
    obj = Base("chosen")
    assert type(obj) is Derived and obj.kind == "chosen"


class Bare(nnx.Module):
    """Made past `Pytree.__new__`."""

    def __new__(cls, by_hand=False):
        obj = object.__new__(cls)
        if by_hand:
            vars(obj)["_pytree__state"] = nnx.pytreelib.PytreeState()
        obj.made = True
        return obj

    def __init__(self, by_hand):
        self.w = nnx.Param(jnp.ones(2))


USES = {
    "flatten": lambda m: jax.tree.map(lambda x: x, m),
    "split": lambda m: nnx.merge(*nnx.split(m)),
    "clone": nnx.clone,
    "jit": nnx.jit(lambda m: m),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "in place": lambda m: m,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("by_hand", [True, False])
def test_objects_made_past_new_are_like_others(by_hand, use):
    got = USES[use](Bare(by_hand))
    assert got.made and got.w[...].tolist() == [1.0, 1.0]
    assert dict(got._pytree__nodes) == {"made": False, "w": True}


@pytest.mark.parametrize("use", USES)
def test_objects_without_any_bookkeeping_are_like_empty_ones(use):
    got = USES[use](object.__new__(Derived))
    assert type(got) is Derived and dict(got._pytree__nodes) == {}
    assert not got._pytree__state.initializing


def test_deleting_and_changing_class_need_no_bookkeeping():
    m = object.__new__(Derived)
    vars(m)["a"] = 1
    del m.a
    m.__class__ = Bare
    assert type(m) is Bare and repr(m) == "Bare()"


def with_property():
    class Reads(nnx.Module):
        @property
        def k(self):
            return self.inner

        @k.setter
        def k(self, value):
            self.inner = value

    return Reads


def test_attributes_follow_the_bases_that_a_class_has_now():
    child = type("Child", (type("Plain", (nnx.Module,), {}),), {})
    m = child()
    m.k = 1
    child.__bases__ = (with_property(),)
    m.k = 2
    assert (vars(m)["k"], m.inner) == (1, 2)


def test_attributes_follow_a_property_that_comes_and_goes():
    Reads = with_property()
    m, prop = Reads(), Reads.k
    del Reads.k
    m.k = jnp.ones(2)
    assert m._pytree__nodes["k"] and len(jax.tree.leaves(m)) == 1
    Reads.k = prop
    m.k = 3
    assert m.inner == 3
    Reads.k = "plain"
    m.k = 4
    assert vars(m)["k"] == 4


def test_calls_follow_a_class_that_changes():
    """A `__setattr__` assigned later may write past ours."""
    cls = type("Model", (zoo.Box,), {})
    m, f = cls(k=1), nnx.jit(lambda m: m.k * jnp.ones(()))
    assert [f(m).item() for _ in range(3)] == [1.0] * 3
    cls.__setattr__ = object.__setattr__
    m.k = 2
    assert [f(m).item() for _ in range(3)] == [2.0] * 3
    m.k = 3
    assert f(m) == 3.0


def test_state_has_the_names_of_older_releases():
    state = nnx.Module()._pytree__state
    state._initializing = state._is_setup = True
    assert state.initializing and state.is_setup
    assert state._initializing and state._is_setup
