"""Statuses of attributes: tables and declarations."""

import collections
import dataclasses
import pickle
import weakref

import jax
import numpy as np
import pytest

import graftree as nnx

# Only there can the registration of a type be taken back.
from graftree.core.objects import attributes
from tests import tables, zoo


def test_tables_are_replaced_not_changed():
    box = nnx.Dict(b=1)
    table = box._pytree__nodes
    box.a = np.ones(1)
    assert dict(table) == {"b": False}
    assert dict(box._pytree__nodes) == {"b": False, "a": True}
    del box.b
    assert dict(box._pytree__nodes) == {"a": True}


def test_tables_compare_by_content_can_be_pickled_and_are_shared():
    array = np.ones(1)
    nodes = zoo.Node(x=array, y=1), zoo.Node(x=array, y=2), zoo.Node(y=1, x=array)
    a, alike, b = (node._pytree__nodes for node in nodes)
    assert a is alike and a == b and hash(a) == hash(b)
    assert pickle.loads(pickle.dumps(a)) == a


def test_classes_share_no_order():
    """Names that are equal may have another order and other keys in another class."""
    names = [str(i) for i in range(11)]
    items = nnx.List([nnx.data(i) for i in range(11)])
    node = zoo.Node(_length=11, **{name: nnx.data(int(name)) for name in names})
    for _ in range(2):
        assert jax.tree.leaves(items) == [*range(11)]
        assert jax.tree.leaves(node) == [*map(int, sorted(names))]
        assert node._pytree__nodes == items._pytree__nodes


@tables.cases(
    "assignments",
    [(f"x{i}", nnx.data(1)) for i in range(300)],
    # The status of an attribute may change without an end.
    [("x", (nnx.data, nnx.static)[i % 2](1)) for i in range(300)],
)
def test_what_a_table_keeps_alive_is_bounded(assignments):
    made, own = [], type("Own", (nnx.Pytree,), {})
    for _ in range(2):
        obj = own()
        for name, value in assignments:
            setattr(obj, name, value)
            made.append(weakref.ref(obj._pytree__nodes))
    del obj
    assert len({id(reference()) for reference in made} - {id(None)}) < 100


@pytest.mark.parametrize("register", ["dataclass", "node", "namedtuple", None])
def test_data_is_found_in_whatever_jax_takes_apart(register):
    class Pair:
        def __init__(self, x=None):
            self.x = x

    if register == "dataclass":
        jax.tree_util.register_dataclass(Pair, ["x"], [])
    elif register == "node":
        jax.tree_util.register_pytree_node(
            Pair, lambda pair: ((pair.x,), None), lambda _, children: Pair(*children)
        )
    elif register == "namedtuple":
        Pair = collections.namedtuple("Pair", "x")
    array = np.ones(1)
    assert nnx.has_data(Pair(array)) == ([array] if register else [])
    if register is None:
        zoo.Node(pair=Pair(nnx.data(1)))
        return
    with pytest.raises(ValueError, match="unexpected tags"):
        zoo.Node(pair=nnx.data(Pair(nnx.data(1))))
    if register == "namedtuple":
        with pytest.raises(ValueError, match="Found data"):
            zoo.Node(pair=Pair(array))


def test_numbers_can_be_registered_as_data():
    nnx.register_data_type(complex)
    try:
        assert jax.tree.leaves(zoo.Node(a=1j, b=1)) == [1j] and nnx.has_data(1j) == [1j]
    finally:
        attributes.DATA_REGISTRY.discard(complex)
        nnx.register_data_type(type("Clears", (), {}))
        attributes.ATOMS.add(complex)
    assert not nnx.is_data(1j)


def test_factory_of_a_field_needs_a_dataclass():
    class Made(nnx.Pytree):
        a: list = nnx.data(default_factory=lambda: [np.ones(1)])

    with pytest.raises(AttributeError, match=r"nnx\.dataclass"):
        Made().a
    assert len(nnx.state(nnx.dataclass(Made)())["a"]) == 1


@pytest.mark.parametrize("decorate", [nnx.dataclass, dataclasses.dataclass])
def test_each_of_several_declared_fields_has_its_status(decorate):
    # The decorator gives `name` its default before it says which fields there are.
    @decorate
    class Net(nnx.Module):
        layers: list = nnx.data()
        name: str = nnx.static(default="net")

    assert len(jax.tree.leaves(Net([nnx.Param(np.ones(1))]))) == 1


def test_marks_are_fields_of_dataclasses():
    assert nnx.data(1).is_data and not nnx.static(1).is_data
    assert isinstance(nnx.data(1), dataclasses.Field)


def test_registering_a_type_reaches_instances_seen_before():
    late = type("Late", (), {})
    assert not nnx.is_data(late())
    nnx.register_data_type(late)
    assert nnx.is_data(late())


@pytest.mark.parametrize("declare", [nnx.data, nnx.static])
def test_unknown_options_of_a_declaration_are_named(declare):
    with pytest.raises(TypeError) as caught:
        declare(default=1, static=True, alias="a")
    expected = f"nnx.{declare.__name__} got unexpected options ['alias', 'static']."
    assert str(caught.value) == expected
