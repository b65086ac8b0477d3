"""Objects of types that were registered as graph nodes follow plans, as ours do."""

import gc
import weakref

import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree.core.graph.nodes import StaticElem
from tests.static_values import Tag


class Bag:
    """A graph node by registration, which lists its label as metadata."""

    def __init__(self, label=""):
        self.label = label
        self.items = {}


class Slotted:
    """The same of a type that weak references can't refer to."""

    __slots__ = ("items", "label")
    __init__ = Bag.__init__


def listed(bag):
    # What is a number is static: else it would be data that never changes.
    return [
        (key, StaticElem(x) if isinstance(x, int) else x)
        for key, x in bag.items.items()
    ], bag.label


def register(kind):
    nnx.graphlib.register_graph_node_type(
        kind,
        listed,
        lambda bag, key, value: bag.items.__setitem__(key, value),
        lambda bag, key: bag.items.pop(key),
        lambda label: kind(label),
        lambda bag: bag.items.clear(),
        lambda bag, items: bag.items.update(items),
    )


register(Bag)
register(Slotted)

PLACES = pytest.mark.parametrize("wrap", [lambda bag: bag, lambda bag: Owner(bag)])


class Owner(nnx.Module):
    def __init__(self, bag):
        self.bag = nnx.data(bag)
        self.more = nnx.data([bag])


def make(kind=Bag):
    bag = kind("a")
    bag.items = {"w": nnx.Param(jnp.ones(2)), "n": 2, "inner": [nnx.Param(jnp.ones(2))]}
    return bag


def bag_of(x):
    return x.bag if isinstance(x, Owner) else x


def step(x, factor):
    """Depends on all that is in a bag, and writes its Variables."""
    bag = bag_of(x)
    total = 0.0
    for key in sorted(bag.items):
        value = bag.items[key]
        for box in value if isinstance(value, list) else [value]:
            if isinstance(box, nnx.Variable):
                total += box[...].sum() * len(key)
                box[...] = box[...] * factor + 1
            else:
                total += jnp.sum(box) * 10.0
    return total + len(bag.label) * 100.0


@PLACES
def test_they_are_taken_apart_until_there_is_a_plan(graph_mode, wrap, packs):
    x, called = wrap(make()), nnx.jit(step, **graph_mode)
    for _ in range(5):
        called(x, 2.0)
    assert len(packs) <= 2


CHANGES = {
    "a value": lambda bag: bag.items["w"].set_value(jnp.full(2, 7.0)),
    "another Variable": lambda bag: bag.items.update(w=nnx.Param(jnp.zeros(2))),
    "a static value": lambda bag: bag.items.update(n=3),
    "one more": lambda bag: bag.items.update(x=nnx.Param(jnp.ones(2))),
    "one less": lambda bag: bag.items.pop("inner"),
    "a member of a list": lambda bag: bag.items["inner"].append(nnx.Param(jnp.ones(2))),
    "metadata": lambda bag: setattr(bag, "label", "longer"),
    "an array": lambda bag: bag.items.update(z=jnp.ones(2)),
}


@PLACES
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_are_seen(graph_mode, wrap, change):
    check_changes(graph_mode, wrap(make()), wrap(make()), change)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_are_seen_where_there_are_no_weak_references(change):
    check_changes({}, make(Slotted), make(Slotted), change)


def values(x):
    """The values of its Variables, by path."""
    return str(nnx.to_pure_dict(nnx.state((x,), nnx.Param)))


def check_changes(mode, x, y, change):
    planned = nnx.jit(step, **mode)
    for turn in range(6):
        for bag in (bag_of(x), bag_of(y)):
            if turn == 3:
                change(bag)
            if "z" in bag.items:
                bag.items["z"] = jnp.full(2, turn * 1.0)
        assert planned(x, 2.0) == step(y, 2.0)
        assert values(x) == values(y)


@PLACES
def test_a_plan_keeps_none_alive(wrap):
    bag = make()
    x, called = wrap(bag), nnx.jit(step)
    for _ in range(4):
        called(x, 2.0)
    gone = weakref.ref(bag)
    del x, bag
    gc.collect()
    assert gone() is None


@PLACES
def test_a_bag_that_refers_back_is_freed(wrap):
    bag = make()
    x = wrap(bag)
    bag.items["back"] = x
    called = nnx.jit(lambda x: bag_of(x).items["w"][...].sum())
    for _ in range(4):
        called(x)
    gone = weakref.ref(bag)
    del x, bag
    gc.collect()
    assert gone() is None


def test_the_structure_of_one_is_committed_by_a_plan():
    def grow(bag):
        bag.items[f"n{len(bag.items)}"] = nnx.Param(jnp.ones(2))
        return len(bag.items)

    bag, called = make(), nnx.jit(grow)
    assert [called(bag) for _ in range(4)] == [4, 5, 6, 7]
    assert sorted(bag.items) == ["inner", "n", "n3", "n4", "n5", "n6", "w"]


def test_what_changes_inside_of_metadata_is_seen():
    bag, called = make(), nnx.jit(lambda bag: len(bag.label.name))
    bag.label = Tag("a")
    assert [called(bag) for _ in range(3)] == [1, 1, 1]
    bag.label.name = "abc"
    assert called(bag) == 3
