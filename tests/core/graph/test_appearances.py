"""An object looks the same if its entry in a skeleton is the same, and only then."""

import gc
import weakref

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import graftree as nnx
from graftree.core.graph import flattening
from graftree.core.graph.appearances import Appearance
from graftree.core.objects import bookkeeping
from tests import strategies
from tests.static_values import Tag


class Attributes:
    def __init__(self):
        self.flag = True
        self.rate = 0.5
        self.name = "a name"
        self.none = None
        self.tag = Tag("a")
        self.kernel = nnx.Param(jnp.ones(2))
        self.array = jnp.zeros(3)
        self.child = nnx.Dict(a=1)
        self.items = nnx.data([nnx.Param(jnp.ones(1))])
        self.number = nnx.data(1000)


class Model(Attributes, nnx.Module):
    pass


class Node(Attributes, nnx.Object):
    """No pytree to JAX: the values of its attributes decide what is data."""


class Other(Model):
    pass


KINDS = pytest.mark.parametrize("kind", [Model, Node])


def appearance_of(model):
    bookkeeping.watch(model)
    return Appearance(model)


def put_again(model, name, other):
    kept = getattr(model, name)
    setattr(model, name, other)
    setattr(model, name, kept)


SAME = {
    "nothing": lambda m: None,
    "same value": lambda m: setattr(m, "flag", True),
    "there and back": lambda m: put_again(m, "flag", 1),
    "equal number": lambda m: setattr(m, "rate", float("0.5")),
    "equal text": lambda m: setattr(m, "name", "".join(["a ", "name"])),
    "equal data": lambda m: setattr(m, "number", int("1000")),
    "same object": lambda m: put_again(m, "tag", None),
    "same Variable": lambda m: put_again(m, "kernel", nnx.Param(jnp.ones(2))),
    "same child": lambda m: put_again(m, "child", nnx.Dict(a=1)),
    "same list": lambda m: put_again(m, "items", nnx.data([])),
    "another array": lambda m: setattr(m, "array", jnp.ones(5)),
    "a NumPy array": lambda m: setattr(m, "array", np.ones(5)),
    "value": lambda m: m.kernel.set_value(jnp.ones(5)),
    "vars": lambda m: vars(m).update(flag=True),
    "touch": nnx.touch,
}
OTHER_STATICS = {
    "flag": lambda m: setattr(m, "flag", False),
    "equal flag": lambda m: setattr(m, "flag", 1),
    "equal float": lambda m: setattr(m, "flag", 1.0),
    "vars": lambda m: vars(m).update(flag=False),
    "number": lambda m: setattr(m, "rate", 0.25),
    "None": lambda m: setattr(m, "none", 0),
    "equal object": lambda m: setattr(m, "tag", Tag("a")),
}
OTHER = {
    "Variable": lambda m: setattr(m, "kernel", nnx.Param(jnp.ones(2))),
    "array to Variable": lambda m: setattr(m, "array", nnx.Param(jnp.ones(3))),
    "Variable to array": lambda m: setattr(m, "kernel", jnp.ones(3)),
    "child": lambda m: setattr(m, "child", nnx.Dict(a=1)),
    "child to Variable": lambda m: setattr(m, "child", nnx.Param(jnp.ones(3))),
    "no child": lambda m: setattr(m, "child", None),
    "list": lambda m: setattr(m, "items", nnx.data([*m.items])),
    "equal number of another type": lambda m: setattr(m, "number", 1000.0),
    "static to data": lambda m: setattr(m, "flag", nnx.data(True)),
    "data to static": lambda m: setattr(m, "number", nnx.static(1000)),
    "new": lambda m: setattr(m, "new", 1),
    "deleted": lambda m: delattr(m, "tag"),
    "renamed": lambda m: vars(m).__setitem__("boxes", vars(m).pop("items")),
    "unwatched": lambda m: setattr(m, "__dict__", dict(vars(m))),
    "flags": lambda m: setattr(bookkeeping.state_of(m), "is_setup", True),
    "no bookkeeping": lambda m: vars(m).pop(bookkeeping.STATE),
}


@KINDS
@pytest.mark.parametrize("change", SAME.values(), ids=SAME.keys())
def test_an_object_that_is_as_it_was_looks_the_same(kind, change):
    model = kind()
    look = appearance_of(model)
    change(model)
    assert look.is_same()
    assert look.is_same_but_for_statics()


@KINDS
@pytest.mark.parametrize("change", OTHER_STATICS.values(), ids=OTHER_STATICS.keys())
def test_other_static_values_are_seen(kind, change):
    model = kind()
    look = appearance_of(model)
    change(model)
    assert not look.is_same()
    assert look.is_same_but_for_statics() is (kind is Model)


@KINDS
@pytest.mark.parametrize("change", OTHER.values(), ids=OTHER.keys())
def test_all_other_changes_are_seen(kind, change):
    model = kind()
    look = appearance_of(model)
    change(model)
    assert not look.is_same()
    assert not look.is_same_but_for_statics()


@KINDS
def test_another_name_is_seen(kind):
    model = kind()
    look = appearance_of(model)
    vars(model)["flags"] = vars(model).pop("flag")
    assert not look.is_same()
    model.rate = 0.25
    assert not look.is_same()


def test_another_class_is_seen():
    model = Model()
    look = appearance_of(model)
    model.__class__ = Other
    assert not look.is_same()


def test_signs_and_nan_are_told_apart():
    model = Model()
    for value, other, is_same in (
        (0.0, -0.0, False),
        (0.0, float("0.0"), True),
        (float("nan"), float("nan"), False),
        (complex(0, 0.0), complex(0, -0.0), False),
    ):
        model.rate = value
        look = appearance_of(model)
        model.rate = other
        assert look.is_same() is is_same


def test_what_stands_for_a_child_is_not_taken_for_the_users_own_reference():
    model, child = nnx.Module(), nnx.Module()
    model.ref = nnx.data(weakref.ref(child))
    look = appearance_of(model)
    assert look.is_same()
    model.ref = child
    assert not look.is_same()


@KINDS
def test_an_appearance_keeps_nothing_alive(kind):
    model = kind()
    look = appearance_of(model)
    gone = [weakref.ref(x) for x in (model, model.child, model.array)]
    del model
    gc.collect()
    assert [x() for x in gone] == [None] * 3
    assert not look.is_same()
    assert not look.is_same_but_for_statics()


@KINDS
@strategies.examples(60, 300)
@given(data=st.data())
def test_objects_that_look_the_same_have_the_same_skeleton_and_leaves(kind, data):
    def taken_apart():
        graphdef, leaves = flattening.flatten_graph(model)
        return graphdef, [x if isinstance(x, nnx.Variable) else None for x in leaves]

    model = kind()
    look = appearance_of(model)
    graphdef, leaves = taken_apart()
    changes = st.sampled_from([*SAME.values(), *OTHER_STATICS.values()])
    for change in data.draw(st.lists(changes, min_size=1, max_size=6)):
        change(model)
    now, now_leaves = taken_apart()
    is_alike = all(a is b for a, b in zip(leaves, now_leaves, strict=True))
    if look.is_same():
        assert now == graphdef and is_alike
