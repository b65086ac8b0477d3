"""Statuses of attributes: tables and declarations."""

import collections
import dataclasses
import pickle
import weakref

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree.core.objects import attributes, classes
from graftree.core.objects.attributes import AttributeTable, Naming


def test_tables_are_replaced_not_changed():
    box = nnx.Dict(b=1)
    table = box._pytree__nodes
    box.a = jnp.ones(1)
    assert dict(table) == {"b": False}
    assert dict(box._pytree__nodes) == {"b": False, "a": True}
    del box.b
    assert dict(box._pytree__nodes) == {"a": True}


def test_tables_list_all_data_and_static_names_in_order():
    table = AttributeTable({"b": True, "c": False, "a": True})
    assert table.names(Naming()) == (("a", "b", "c"), ("a", "b"), ("c",))
    assert table.names(Naming()) is table.names(Naming())


def test_tables_compare_by_content_and_can_be_pickled():
    a, b = (
        AttributeTable({"x": True, "y": False}),
        AttributeTable({"y": False, "x": True}),
    )
    assert a == b and hash(a) == hash(b)
    assert pickle.loads(pickle.dumps(a)) == a


class Layer(nnx.Pytree):
    def __init__(self, **attributes):
        for name, value in attributes.items():
            setattr(self, name, value)


def test_objects_that_are_made_alike_share_their_table():
    first, second = Layer(a=1, b=jnp.ones(1)), Layer(a=2, b=jnp.ones(2))
    other = Layer(b=jnp.ones(1), a=1)
    assert first._pytree__nodes is second._pytree__nodes
    assert other._pytree__nodes == first._pytree__nodes


def test_classes_share_no_tables():
    """Names that are equal may have another order and other keys in another class."""
    names = [str(i) for i in range(11)]
    layer = Layer(_length=11, **dict.fromkeys(names, 0))
    items = nnx.List([0] * 11)
    assert layer._pytree__nodes == items._pytree__nodes
    naming = classes.facts_of(nnx.List).naming
    assert items._pytree__nodes.names(naming)[0] == (*names, "_length")
    assert layer._pytree__nodes.names(Naming())[0] == (*sorted(names), "_length")


@pytest.mark.parametrize(
    "extensions",
    [
        [(f"x{i}", True) for i in range(300)],
        # The status of an attribute may change without an end.
        [("x", i % 2 == 0) for i in range(300)],
    ],
)
def test_what_a_table_keeps_alive_is_bounded(extensions):
    first, made = AttributeTable({}), []
    for _ in range(2):
        table = first
        for extension in extensions:
            table = table.with_entry(*extension)
            made.append(weakref.ref(table))
    del table
    assert len({id(reference()) for reference in made} - {id(None)}) < 100


@pytest.mark.parametrize("statuses", [{}, {"b": True}, {"b": False}])
@pytest.mark.parametrize("more", [{}, {"c": True, "a": False, "d": False}])
def test_getters_give_tuples_for_any_number_of_attributes(statuses, more):
    statuses = {**more, **statuses}
    table = AttributeTable(statuses)
    names, data_of, statics_of, in_order = table.getters(Naming())
    entries = {name: name.upper() for name in statuses}
    data = tuple(n.upper() for n in sorted(statuses) if statuses[n])
    static = tuple(n.upper() for n in sorted(statuses) if not statuses[n])
    assert names == tuple(sorted(statuses))
    assert (data_of(entries), statics_of(entries)) == (data, static)
    assert in_order((*data, *static)) == tuple(name.upper() for name in names)


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
        attributes.check_no_tags(Layer, "pair", Pair(tag))
    else:
        with pytest.raises(ValueError, match="unexpected tags"):
            attributes.check_no_tags(Layer, "pair", Pair(tag))


def test_data_is_found_in_named_tuples():
    pair = collections.namedtuple("Pair", "x y")(jnp.ones(1), 2)
    assert nnx.has_data(pair) == [pair.x]
    with pytest.raises(ValueError, match="Found data"):
        Layer(pair=pair)


def test_numbers_can_be_registered_as_data():
    nnx.register_data_type(complex)
    try:
        layer = Layer(a=1j, b=1)
        assert jax.tree.leaves(layer) == [1j] and nnx.has_data(1j) == [1j]
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
