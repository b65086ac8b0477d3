"""Statuses of attributes: tables and declarations."""

import collections
import dataclasses
import pickle
import weakref

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx

# Only there can the registration of a type be taken back.
from graftree.core.objects import attributes
from tests import zoo


def test_tables_are_replaced_not_changed():
    box = nnx.Dict(b=1)
    table = box._pytree__nodes
    box.a = jnp.ones(1)
    assert dict(table) == {"b": False}
    assert dict(box._pytree__nodes) == {"b": False, "a": True}
    del box.b
    assert dict(box._pytree__nodes) == {"a": True}


def test_tables_compare_by_content_and_can_be_pickled():
    array = jnp.ones(1)
    a, b = zoo.Node(x=array, y=1)._pytree__nodes, zoo.Node(y=1, x=array)._pytree__nodes
    assert a == b and hash(a) == hash(b)
    assert pickle.loads(pickle.dumps(a)) == a


def test_objects_that_are_made_alike_share_their_table():
    first, second = zoo.Node(a=1, b=jnp.ones(1)), zoo.Node(a=2, b=jnp.ones(2))
    assert first._pytree__nodes is second._pytree__nodes


def test_classes_share_no_order():
    """Names that are equal may have another order and other keys in another class."""
    names = [str(i) for i in range(11)]
    items = nnx.List([nnx.data(i) for i in range(11)])
    node = zoo.Node(_length=11, **dict(zip(names, items, strict=True)))
    assert node._pytree__nodes.keys() == items._pytree__nodes.keys()
    node = zoo.Node(_length=11, **{name: nnx.data(int(name)) for name in names})
    for _ in range(2):
        assert jax.tree.leaves(items) == [*range(11)]
        assert jax.tree.leaves(node) == [*map(int, sorted(names))]
        assert node._pytree__nodes == items._pytree__nodes


@pytest.mark.parametrize(
    "assignments",
    [
        [(f"x{i}", nnx.data(1)) for i in range(300)],
        # The status of an attribute may change without an end.
        [("x", (nnx.data, nnx.static)[i % 2](1)) for i in range(300)],
    ],
)
def test_what_a_table_keeps_alive_is_bounded(assignments):
    class Own(nnx.Pytree):
        pass

    made = []
    for _ in range(2):
        obj = Own()
        for name, value in assignments:
            setattr(obj, name, value)
            made.append(weakref.ref(obj._pytree__nodes))
    del obj
    assert len({id(reference()) for reference in made} - {id(None)}) < 100


@pytest.mark.parametrize("register", ["dataclass", "node", None])
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
    array, tag = jnp.ones(1), nnx.data(1)
    assert nnx.has_data(Pair(array)) == ([array] if register else [])
    if register is None:
        zoo.Node(pair=Pair(tag))
    else:
        with pytest.raises(ValueError, match="unexpected tags"):
            zoo.Node(pair=nnx.data(Pair(tag)))


def test_data_is_found_in_named_tuples():
    pair = collections.namedtuple("Pair", "x y")(jnp.ones(1), 2)
    assert nnx.has_data(pair) == [pair.x]
    with pytest.raises(ValueError, match="Found data"):
        zoo.Node(pair=pair)


def test_numbers_can_be_registered_as_data():
    nnx.register_data_type(complex)
    try:
        node = zoo.Node(a=1j, b=1)
        assert jax.tree.leaves(node) == [1j] and nnx.has_data(1j) == [1j]
    finally:
        attributes.DATA_REGISTRY.discard(complex)
        nnx.register_data_type(type("Clears", (), {}))
        attributes.ATOMS.add(complex)
    assert not nnx.is_data(1j)


def test_factory_of_a_field_needs_a_dataclass():
    class Plain(nnx.Pytree):
        a: list = nnx.data(default_factory=list)

    with pytest.raises(AttributeError, match=r"nnx\.dataclass"):
        Plain().a

    @nnx.dataclass
    class Made(nnx.Pytree):
        a: list = nnx.data(default_factory=lambda: [jnp.ones(1)])

    assert len(nnx.state(Made())["a"]) == 1


@pytest.mark.parametrize("decorate", [nnx.dataclass, dataclasses.dataclass])
def test_each_of_several_declared_fields_has_its_status(decorate):
    # The decorator gives `name` its default before it says which fields there are.
    @decorate
    class Net(nnx.Module):
        layers: list = nnx.data()
        name: str = nnx.static(default="net")

    assert len(jax.tree.leaves(Net([nnx.Param(jnp.ones(1))]))) == 1


def test_marks_are_fields_of_dataclasses():
    assert nnx.data(1).is_data and not nnx.static(1).is_data
    assert isinstance(nnx.data(1), dataclasses.Field)


def test_registering_a_type_reaches_instances_seen_before():
    class Late:
        pass

    assert not nnx.is_data(Late())
    nnx.register_data_type(Late)
    assert nnx.is_data(Late())


@pytest.mark.parametrize("declare", [nnx.data, nnx.static])
def test_unknown_options_of_a_declaration_are_named(declare):
    with pytest.raises(TypeError) as caught:
        declare(default=1, static=True, alias="a")
    expected = f"nnx.{declare.__name__} got unexpected options ['alias', 'static']."
    assert str(caught.value) == expected
