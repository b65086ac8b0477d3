"""What is taken apart again comes from memory, and never as it was before a change.

The oracle is the law that merge undoes split, to the very objects: it holds after
anything that was done to an object whose parts are remembered.
"""

import copy
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import graftree as nnx

# Only by setting them can a thread be interrupted between a write and its stamp.
from graftree.core import stamps
from tests import comparisons, strategies, zoo
from tests.static_values import Tag

ONES, ZEROS = jnp.ones(2), jnp.zeros(2)


def param():
    return nnx.Param(ONES)


class Named(zoo.Box):
    """Its name is kept under another one, by a property."""

    @property
    def name(self):
        return self._name

    @name.setter
    def name(self, value):
        self._name = value


class Hidden(Named, pytree=False):
    """No pytree to JAX: the values of its attributes decide what is data."""


class Other(Named):
    pass


def made(kind=Named):
    return kind(
        name="model",
        flag=True,
        rate=0.5,
        text="a text",
        none=None,
        tag=Tag("a"),
        tags=("x", Tag("a")),
        unhashable=[1, 2],
        number=nnx.data(1000),
        kernel=nnx.Param(ONES, sizes=[1, 2]),
        array=ZEROS,
        child=nnx.Dict(a=1),
        layers=nnx.List([zoo.Box(w=param(), bias=param())]),
        heads=nnx.Dict(a=param()),
        plain=nnx.data([param(), 1000, ONES]),
        by_name=nnx.data({"x": param(), "y": "static"}),
        state=nnx.data((nnx.State({"a": {"b": param()}}),)),
        moments=nnx.data(strategies.Moments(param(), ONES)),
    )


OTHER = zoo.Scale()


def alone(model):
    return model


def together(model):
    return {"model": model, "more": [OTHER]}


WHOLES = pytest.mark.parametrize("whole", [alone, together])
KINDS = pytest.mark.parametrize(
    ("kind", "graph"),
    [(Named, True), (Named, False), (Hidden, True)],
    ids=["graph", "tree", "no pytree"],
)


def is_same_leaf(a, b):
    return a is b or (type(a) in (int, float, complex, str) and repr(a) == repr(b))


def checked(whole, graph):
    """The GraphDef of an object, which tells it as it is now."""
    graphdef, state = nnx.split(whole, graph=graph)
    pairs = comparisons.check_same(whole, nnx.merge(graphdef, state), is_same_leaf)
    assert all(a is b for a, b in comparisons.variables_of(pairs))
    assert graphdef == nnx.graphdef(copy.copy(whole), graph=graph)
    return graphdef


def remembered(whole, graph):
    """The GraphDef of an object, from memory."""
    graphdefs = [checked(whole, graph) for _ in range(3)]
    assert graphdefs[1] is graphdefs[2]
    return graphdefs[2]


def put_again(model, name, other):
    kept = getattr(model, name)
    setattr(model, name, other)
    setattr(model, name, kept)


def rename(entries, name, other):
    entries[other] = entries.pop(name)


SAME = {
    "nothing": lambda m: None,
    "same value": lambda m: setattr(m, "flag", True),
    "there and back": lambda m: put_again(m, "flag", 1),
    "equal number": lambda m: setattr(m, "rate", float("0.5")),
    "equal text": lambda m: setattr(m, "text", "".join(["a ", "text"])),
    "equal data": lambda m: setattr(m, "number", int("1000")),
    "same object": lambda m: put_again(m, "tag", None),
    "same name": lambda m: put_again(m, "name", "other"),
    "same Variable": lambda m: put_again(m, "kernel", param()),
    "same child": lambda m: put_again(m, "child", nnx.Dict(a=1)),
    "same list": lambda m: put_again(m, "plain", nnx.data([])),
    "another array": lambda m: setattr(m, "array", jnp.ones((2, 3))),
    "a NumPy array": lambda m: setattr(m, "array", np.ones(3)),
    "value": lambda m: m.kernel.set_value(ZEROS),
    "other shape": lambda m: m.kernel.set_value(jnp.ones((2, 3))),
    "vars": lambda m: vars(m).update(flag=True),
    "touch": lambda m: [nnx.touch(x) for x in (m, m.layers, m.layers[0], m.heads)],
    "another object": lambda m: setattr(zoo.Box(a=1), "a", 2),
}
# After these, other static values may come again.
STATICS = {
    "flag": lambda m: setattr(m, "flag", False),
    "equal flag": lambda m: setattr(m, "flag", 1),
    "equal float": lambda m: setattr(m, "flag", 1.0),
    "vars": lambda m: vars(m).update(flag=False),
    "number": lambda m: setattr(m, "rate", 0.25),
    "None": lambda m: setattr(m, "none", 0),
    "object": lambda m: setattr(m, "tag", Tag("b")),
    "equal object": lambda m: setattr(m, "tag", Tag("a")),
    "property": lambda m: setattr(m, "name", "other"),
}
CHANGES = STATICS | {
    "new": lambda m: setattr(m, "new", 1),
    "deleted": lambda m: delattr(m, "tag"),
    "another name": lambda m: rename(vars(m), "flag", "flags"),
    "static to data": lambda m: setattr(m, "flag", nnx.data(True)),
    "data to static": lambda m: setattr(m, "number", nnx.static(1000)),
    "data of another type": lambda m: setattr(m, "number", 1000.0),
    "static in place": lambda m: m.unhashable.append(3),
    "hash": lambda m: setattr(m.tag, "name", "b"),
    "hash in a tuple": lambda m: setattr(m.tags[1], "name", "b"),
    "Variable": lambda m: setattr(m, "kernel", param()),
    "array to Variable": lambda m: setattr(m, "array", param()),
    "Variable to array": lambda m: setattr(m, "kernel", ONES),
    "metadata": lambda m: m.kernel.set_metadata(tag=1),
    "metadata in place": lambda m: m.kernel.sizes.append(3),
    "ref": lambda m: m.kernel.set_raw_value(jax.new_ref(ONES)),
    "child": lambda m: setattr(m, "child", nnx.Dict(a=1)),
    "child to Variable": lambda m: setattr(m, "child", param()),
    "no child": lambda m: setattr(m, "child", None),
    "deep": lambda m: setattr(m.layers[0], "bias", None),
    "class": lambda m: setattr(m.layers[0], "__class__", Named),
    "own dict": lambda m: setattr(m, "__dict__", dict(vars(m))),
    "flags": lambda m: (setattr(m._pytree__state, "is_setup", True), nnx.touch(m)),
    "list append": lambda m: m.layers.append(1),
    "list item": lambda m: m.layers.__setitem__(0, param()),
    "list pop": lambda m: m.layers.pop(),
    "dict item": lambda m: m.heads.__setitem__("b", 1),
    "dict delete": lambda m: m.heads.__delitem__("a"),
    "plain list": lambda m: setattr(m, "plain", nnx.data([*m.plain])),
    "plain append": lambda m: m.plain.append(2),
    "plain item": lambda m: m.plain.__setitem__(0, param()),
    "plain static": lambda m: m.plain.__setitem__(1, 1001),
    "plain array": lambda m: m.plain.__setitem__(2, jnp.zeros(2)),
    "plain dict": lambda m: m.by_name.__setitem__("z", ONES),
    "plain dict value": lambda m: m.by_name.__setitem__("x", param()),
    "plain dict key": lambda m: rename(m.by_name, "y", "w"),
    "state item": lambda m: m.state[0]["a"].__setitem__("b", param()),
    "state array": lambda m: m.state[0]["a"].__setitem__("b", ONES),
    "state float": lambda m: m.state[0]["a"].__setitem__("b", 1.0),
    "state type": lambda m: m.state[0]["a"].__setitem__("b", nnx.Cache(ONES)),
    "state key": lambda m: rename(m.state[0]["a"], "b", "c"),
    "state new": lambda m: m.state[0].__setitem__("c", param()),
    "other pytree": lambda m: setattr(m.moments, "mean", param()),
}


@KINDS
@WHOLES
@pytest.mark.parametrize("name", SAME)
def test_an_object_that_is_as_it_was_comes_from_memory(whole, kind, graph, name):
    model = made(kind)
    before = remembered(whole(model), graph)
    SAME[name](model)
    assert checked(whole(model), graph) is before


@KINDS
@WHOLES
@pytest.mark.parametrize("name", CHANGES)
def test_every_change_of_structure_is_seen(whole, kind, graph, name):
    model = made(kind)
    before = remembered(whole(model), graph)
    CHANGES[name](model)
    assert remembered(whole(model), graph) is not before


def test_another_class_is_seen(graph):
    model = made()
    remembered(model, graph)
    model.__class__ = Other
    assert nnx.merge(*nnx.split(model, graph=graph)).__class__ is Other


@pytest.mark.parametrize(
    ("value", "other", "is_same"),
    [
        (0.0, -0.0, False),
        (0.0, float("0.0"), True),
        (complex(0, 0.0), complex(0, -0.0), False),
    ],
)
def test_signs_of_zeros_are_told_apart(value, other, is_same, graph):
    model = zoo.Box(rate=value)
    before = remembered(model, graph)
    model.rate = other
    assert (checked(model, graph) is before) is is_same


def test_another_nan_is_another_value(graph):
    model = zoo.Box(rate=float("nan"))
    for _ in range(3):
        before = nnx.graphdef(model, graph=graph)
    model.rate = float("nan")
    assert nnx.graphdef(model, graph=graph) is not before


@WHOLES
@pytest.mark.parametrize("name", STATICS)
def test_static_values_that_take_turns_are_remembered(whole, graph, name):
    model = made()
    kept = dict(vars(model))
    first = remembered(whole(model), graph)
    STATICS[name](model)
    second = remembered(whole(model), graph)
    for key in ("flag", "rate", "none", "tag", "_name"):
        setattr(model, key, kept[key])
    assert checked(whole(model), graph) is first
    STATICS[name](model)
    is_another_object = name in ("object", "equal object")
    assert (checked(whole(model), graph) is second) is not is_another_object


def test_a_static_value_that_came_again_may_still_change_in_place(graph):
    model = made()
    tag, before = model.tag, remembered(model, graph)
    model.tag = Tag("b")
    checked(model, graph)
    model.tag = tag
    assert checked(model, graph) is before
    tag.name = "b"
    assert checked(model, graph) is not before


@KINDS
@strategies.examples(60, 300)
@given(steps=st.lists(st.sampled_from([*SAME.values(), *STATICS.values()]), max_size=6))
def test_whatever_is_done_to_an_object_it_is_told_as_it_is(kind, graph, steps):
    model = made(kind)
    remembered(model, graph)
    for change in steps:
        change(model)
        checked(model, graph)


@WHOLES
def test_leaves_are_a_new_list_each_time(whole, graph):
    model = made()
    remembered(whole(model), graph)
    leaves = [nnx.flatten(whole(model), with_paths=False, graph=graph)[1] for _ in "ab"]
    leaves[0].clear()
    assert len(leaves[1]) > 0


def test_modes_have_memories_of_their_own():
    model = made()
    graphdefs = [nnx.graphdef(model, graph=graph) for graph in [True, False] * 3]
    assert graphdefs[4] is graphdefs[2] != graphdefs[3] is graphdefs[5]


def test_shared_variables_are_refused_in_tree_mode_also_late():
    model, other = made(), made()
    remembered((model, other), graph=False)
    other.again = model.kernel
    for _ in range(3):
        with pytest.raises(ValueError, match="again"):
            nnx.split((model, other), graph=False)
        checked((model, other), graph=True)
    model.again = model.kernel
    for _ in range(3):
        with pytest.raises(ValueError, match="again"):
            nnx.split(model, graph=False)


def test_copies_have_no_memory_of_the_original():
    model = made()
    remembered(model, graph=True)
    clone = nnx.clone(model)
    clone.array = array = jnp.ones((2, 3))
    checked(clone, graph=True)
    assert nnx.state(clone)["array"] is array is not nnx.state(model)["array"]


def test_members_of_a_container_may_change_places(graph):
    pair = [made(), made()]
    for _ in range(3):
        for node in (pair, (*pair,), pair[::-1], [pair[0], made()], [pair[0]]):
            checked(node, graph)


def test_a_reference_of_the_users_own_is_not_taken_for_its_object():
    model, child = zoo.Box(), zoo.Box()
    model.ref = nnx.data(weakref.ref(child))
    remembered(model, graph=True)
    model.ref = child
    checked(model, graph=True)


@pytest.mark.parametrize("kind", [Named, Hidden])
@WHOLES
def test_the_memory_keeps_nothing_alive(whole, kind):
    model = made(kind)
    model.array = jnp.zeros(2)
    remembered(whole(model), graph=True)
    array = weakref.ref(model.array)
    model.array = jnp.zeros(2)
    gc.collect()
    assert array() is None
    gone = [weakref.ref(x) for x in (model, model.child, model.layers, model.array)]
    del model
    gc.collect()
    assert [x() for x in gone] == [None] * len(gone)


def test_members_of_which_one_refers_to_the_others_are_freed():
    model, other = made(), made()
    model.others = nnx.data([other])
    for _ in range(3):
        nnx.split((model, other))
    gone = [weakref.ref(x) for x in (model, other, other.kernel)]
    del model, other
    gc.collect()
    assert [x() for x in gone] == [None] * 3


class Registered:
    """An object without stamps; a function of its own runs when it is listed."""

    def __init__(self):
        self.run = lambda: None

    def children(self):
        self.run()
        return [(key, x) for key, x in sorted(vars(self).items()) if key != "run"], None


nnx.graphlib.register_graph_node_type(
    Registered,
    Registered.children,
    setattr,
    lambda node, key: vars(node).pop(key),
    lambda _: Registered(),
    lambda node: vars(node).clear(),
    lambda node, items: vars(node).update(items),
)


def test_objects_of_registered_types_are_compared():
    node = Registered()
    node.a = param()
    model = zoo.Box(node=nnx.data(node))
    for change in (
        lambda: None,
        lambda: setattr(node, "a", param()),
        lambda: setattr(node, "b", ONES),
        lambda: setattr(node, "b", ZEROS),
        lambda: setattr(model, "node", nnx.data([node])),
        lambda: setattr(node, "b", ONES),
    ):
        change()
        for _ in range(3):
            listed = nnx.state(model)["node"]
            listed = listed if isinstance(model.node, Registered) else listed[0]
            assert {k: id(x) for k, x in listed.items()} == {
                k: id(x) for k, x in vars(node).items() if k != "run"
            }


def test_a_change_while_an_object_is_taken_apart_is_seen_the_next_time():
    node = Registered()
    node.a = param()
    model = zoo.Box(k=1, node=nnx.data(node))
    nnx.graphdef(model)
    node.run = lambda: setattr(model, "k", 2)  # `k` was read before
    nnx.graphdef(model)
    node.run = lambda: None
    assert nnx.merge(*nnx.split(model)).k == 2


def test_a_change_is_seen_if_another_thread_writes_its_stamp_last():
    # Issue 12, §7: both change the model; one takes its number before the model is
    # taken apart, and is interrupted before it writes it until the other is through.
    model, other = made(), zoo.Box(late=1)
    zoo.Box(later=1)
    before = remembered(model, graph=True)
    model.tag = Tag("b")
    model._pytree__state.stamp = other._pytree__state.stamp
    stamps.clock.now = other._pytree__state.stamp
    assert checked(model, graph=True) is not before


def test_making_objects_from_a_state_is_no_structural_change():
    graphdef, state = nnx.split(made())
    before = stamps.clock.now
    nnx.merge(graphdef, state)
    assert stamps.clock.now == before
