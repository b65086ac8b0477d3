"""Statuses of attributes: tables and declarations; the static part that JAX gets."""

import collections
import copy
import dataclasses
import gc
import pickle
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graftree as nnx

# Only there can the registration of a type be taken back.
from graftree.core.objects import attributes, bookkeeping
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


# ---------------------------------------------------------------------- the static part


# `split` watches objects too, and remembers their static values beside.


def made(**attributes):
    return zoo.Node(kernel=nnx.Param(jnp.ones(1)), **attributes)


def watched(box):
    assert bookkeeping.watch(box)
    return vars(box)


WRITES = {
    "setattr": setattr,
    "vars": lambda box, name, value: vars(box).update({name: value}),
    "watched vars": lambda box, name, value: watched(box).update({name: value}),
    "object": object.__setattr__,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize(
    "values",
    [(1, True), (1, 1.0), (0.0, -0.0), ("a", "b"), (None, ()), ((1,), (True,))],
    ids=str,
)
def test_another_static_value_is_another_structure(write, values):
    box = made(mode=values[0])
    before = [jax.tree.structure(box) for _ in range(2)]
    write(box, "mode", values[1])
    after = [jax.tree.structure(box) for _ in range(2)]
    assert before[0] == before[1] != after[0] == after[1]
    assert after[0] == jax.tree.structure(made(mode=values[1]))


@pytest.mark.parametrize("name", ["it's", 'a "b"', "\\", "{x}", "None", "ü"])
def test_names_need_not_be_identifiers(name):
    box = made(**{name: 1})
    leaves, treedef = jax.tree.flatten(box)
    assert vars(jax.tree.unflatten(treedef, leaves))[name] == 1
    object.__setattr__(box, name, 2)
    assert treedef != jax.tree.structure(box)


CHANGES = {
    "contents": lambda box: box.sizes.append(2),
    "flags": lambda box: setattr(box._pytree__state, "is_setup", True),
    "one of many": lambda box: object.__setattr__(box, "a99", True),
    "name": lambda box: vars(box).update(other=vars(box).pop("a50")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_all_that_is_static_belongs_to_the_structure(name):
    box = made(sizes=[1], **{f"a{i}": i for i in range(100)})
    before = [jax.tree.structure(box) for _ in range(2)]
    CHANGES[name](box)
    assert before[0] == before[1] != jax.tree.structure(box)
    assert jax.tree.structure(box) == jax.tree.structure(copy.copy(box))


def test_unchanged_objects_give_the_very_same_static_part():
    box = made(mode="a", rate=0.5)
    first, second = (jax.tree.structure(box).node_data()[1] for _ in range(2))
    assert first is second


@pytest.mark.parametrize("write", ["setattr", "watched vars"])
def test_static_values_that_were_replaced_are_let_go(write):
    box = made(function=lambda: None)
    kept = weakref.ref(box.function)
    jax.tree.leaves(box)
    WRITES[write](box, "function", None)
    gc.collect()
    assert kept() is None


def test_structures_keep_no_object():
    box = made(mode="a")
    kept, treedef = weakref.ref(box), [jax.tree.structure(box) for _ in range(2)]
    del box
    gc.collect()
    assert kept() is None and treedef[0] == treedef[1]


values = st.sampled_from([0, False, 0.0, -0.0, "a", None, (), (0,), [0], jnp.ones(1)])
names = st.sampled_from("abc")
writes = st.tuples(st.sampled_from([*WRITES]), names, values)


@settings(max_examples=60, deadline=None)
@given(st.lists(writes, max_size=8))
def test_structure_is_that_of_a_copy_whatever_is_written(steps):
    box = made(a=1, b=nnx.data([1]), c="c")
    for write, name, value in steps:
        try:
            WRITES[write](box, name, copy.copy(value))
            structure = jax.tree.structure(copy.copy(box))
        except ValueError:  # data in a static attribute
            box = made(a=1, b=nnx.data([1]), c="c")
            continue
        assert jax.tree.structure(box) == structure == jax.tree.structure(box)
