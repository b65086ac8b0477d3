"""Statuses of attributes: tables and declarations."""

import dataclasses
import pickle

import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree.core import attributes
from graftree.core.attributes import AttributeTable


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
    assert table.names(None) == (("a", "b", "c"), ("a", "b"), ("c",))
    assert table.names(None) is table.names(None)


def test_tables_compare_by_content_and_can_be_pickled():
    a, b = (
        AttributeTable({"x": True, "y": False}),
        AttributeTable({"y": False, "x": True}),
    )
    assert a == b and hash(a) == hash(b)
    assert pickle.loads(pickle.dumps(a)) == a


def test_declarations_of_all_bases_count():
    class Base(nnx.Pytree):
        a: object = nnx.data()

    class Child(Base):
        b: int = nnx.static()

    assert attributes.declared_statuses(Child) == {"a": True, "b": False}


def test_declaration_may_be_repeated():
    class Base(nnx.Pytree):
        a: object = nnx.data()

    class Child(Base):
        a: list = nnx.data()

    assert Child.declared_statuses == {"a": True}


def test_factory_of_a_field_needs_a_dataclass():
    class Plain(nnx.Pytree):
        a: list = nnx.data(default_factory=list)

    with pytest.raises(AttributeError, match=r"nnx\.dataclass"):
        Plain().a

    @nnx.dataclass
    class Made(nnx.Pytree):
        a: list = nnx.data(default_factory=lambda: [jnp.ones(1)])

    assert len(nnx.state(Made())["a"]) == 1


def test_marks_are_fields_of_dataclasses():
    assert nnx.data(1).is_data and not nnx.static(1).is_data
    assert isinstance(nnx.data(1), dataclasses.Field)


def test_registering_a_type_reaches_instances_seen_before():
    class Late:
        pass

    assert not nnx.is_data(Late())
    nnx.register_data_type(Late)
    assert nnx.is_data(Late())
