"""Objects of types that were registered as graph nodes come as often as ours do."""

import gc
import weakref

import jax.numpy as jnp
import pytest

import graftree as nnx
from tests import tables, zoo
from tests.static_values import Tag
from tests.transforms.crossing.test_costs import PARTS, python_calls


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
        (key, nnx.graphlib.StaticElem(x) if isinstance(x, int) else x)
        for key, x in bag.items.items()
    ], bag.label


for kind in (Bag, Slotted):
    nnx.graphlib.register_graph_node_type(
        kind,
        listed,
        lambda bag, key, value: bag.items.__setitem__(key, value),
        lambda bag, key: bag.items.pop(key),
        lambda label, kind=kind: kind(label),
        lambda bag: bag.items.clear(),
        lambda bag, items: bag.items.update(items),
    )


def ones():
    return nnx.Param(jnp.ones(2))


def make(kind=Bag):
    bag = kind("a")
    bag.items = {"w": ones(), "n": 2, "inner": [ones()]}
    return bag


def owner(bag):
    return zoo.Box(bag=nnx.data(bag), more=nnx.data([bag]))


def bag_of(x):
    return x.bag if isinstance(x, zoo.Box) else x


def step(x, factor):
    """Depends on all that is in a bag, and writes its Variables."""
    bag = bag_of(x)
    total = len(bag.label) * 100.0
    for key, value in sorted(bag.items.items()):
        for box in value if isinstance(value, list) else [value]:
            if isinstance(box, nnx.Variable):
                total += box[...].sum() * len(key)
                box[...] = box[...] * factor + 1
            else:
                total += jnp.sum(box) * 10.0
    return total


# One after the other.
CHANGES = {
    "nothing": lambda bag: None,
    "a value": lambda bag: bag.items["w"].set_value(jnp.full(2, 7.0)),
    "another Variable": lambda bag: bag.items.update(w=nnx.Param(jnp.zeros(2))),
    "a static value": lambda bag: bag.items.update(n=3),
    "one more": lambda bag: bag.items.update(x=ones()),
    "a member of a list": lambda bag: bag.items["inner"].append(ones()),
    "one less": lambda bag: bag.items.pop("inner"),
    "metadata": lambda bag: setattr(bag, "label", "longer"),
    "an array": lambda bag: bag.items.update(z=jnp.ones(2)),
    "another array": lambda bag: bag.items.update(z=jnp.zeros(2)),
}


@tables.cases("kind, wrap", (Bag, bag_of), (Bag, owner), (Slotted, bag_of))
def test_changes_are_seen(graph_mode, kind, wrap):
    x, y = wrap(make(kind)), wrap(make(kind))
    called = nnx.jit(step, **graph_mode)
    for name, change in CHANGES.items():
        change(bag_of(x)), change(bag_of(y))
        for _ in range(3):
            assert called(x, 0.5) == step(y, 0.5), name
            one, other = (nnx.to_pure_dict(nnx.state((z,), nnx.Param)) for z in (x, y))
            assert str(one) == str(other), name


def test_they_are_taken_apart_until_they_are_known(graph_mode):
    for wrap in (bag_of, owner):
        bag, called = make(), nnx.jit(step, **graph_mode)
        bag.items["inner"] += [ones() for _ in range(2 * PARTS)]
        x = wrap(bag)
        counts = [python_calls(called, x, 2.0) for _ in range(5)]
        assert counts[-1] < counts[1]


@pytest.mark.parametrize("wrap", [bag_of, owner])
@pytest.mark.parametrize("refers_back", [False, True])
def test_none_is_kept_alive(wrap, refers_back):
    bag = make()
    x, called = wrap(bag), nnx.jit(lambda x: bag_of(x).items["w"][...].sum())
    if refers_back:
        bag.items["back"] = x
    for _ in range(4):
        called(x)
    gone = weakref.ref(bag)
    del x, bag
    gc.collect()
    assert gone() is None


def test_the_structure_of_one_reaches_the_caller_each_time():
    def grow(bag):
        bag.items[f"n{len(bag.items)}"] = ones()
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
