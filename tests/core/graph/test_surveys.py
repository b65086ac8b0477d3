"""A survey holds until something changes that a skeleton depends on, and no longer."""

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree.core import stamps
from graftree.core.graph import flattening, freshness
from graftree.core.graph.flattening import RefMap
from graftree.core.graph.freshness import Survey
from graftree.core.objects import bookkeeping
from tests.static_values import Tag


@jax.tree_util.register_pytree_node_class
class Pair:
    """A mutable pytree node of a type that only JAX knows."""

    def __init__(self, a, b):
        self.a, self.b = a, b

    def tree_flatten(self):
        return (self.a, self.b), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


class Named(nnx.Module):
    """Its name is kept under another one, by a property."""

    @property
    def name(self):
        return self._name

    @name.setter
    def name(self, value):
        self._name = value


class Model(Named):
    def __init__(self):
        self.name = "model"
        self.kernel = nnx.Param(jnp.ones(2), sizes=[1, 2])
        self.array = jnp.zeros(3)
        self.layers = nnx.List([nnx.Linear(1, 1, rngs=nnx.Rngs(0))])
        self.heads = nnx.Dict(a=nnx.Param(jnp.ones(1)))
        self.plain = nnx.data([nnx.Param(jnp.ones(1)), 1000, jnp.ones(1)])
        self.by_name = nnx.data({"x": nnx.Param(jnp.ones(1)), "y": "static"})
        self.state = nnx.data((nnx.State({"a": {"b": nnx.Param(jnp.ones(1))}}),))
        self.pair = nnx.data(Pair(nnx.Param(jnp.ones(1)), jnp.ones(1)))
        self.tag = Tag("a")
        self.tags = ("x", Tag("a"))
        self.unhashable = [1, 2]


def survey_of(root: Any) -> Survey:
    made = stamps.clock.now
    refs = RefMap()
    flattening.flatten_graph(root, refs)
    return Survey(refs, made)


def test_a_change_is_seen_if_another_thread_writes_its_stamp_last():
    # Issue 12, §7: both change the model; one takes its number before the survey, and
    # is interrupted before it writes it until the other is through.
    model, other = Model(), nnx.Module()
    other.late = 1
    nnx.Module().later = 1
    survey = survey_of(model)
    assert survey.is_complete and survey.holds()
    model.tag = Tag("b")
    bookkeeping.state_of(model).stamp = bookkeeping.state_of(other).stamp
    stamps.clock.now = bookkeeping.state_of(other).stamp
    assert not survey.holds()


def test_a_survey_during_which_anything_changes_is_not_complete():
    model, made, refs = Model(), stamps.clock.now, RefMap()
    flattening.flatten_graph(model, refs)
    nnx.Module().by_another_thread = 1
    assert not Survey(refs, made).is_complete


def set_value(model):
    model.kernel[...] = jnp.zeros(2)


def set_other_shape(model):
    model.kernel.set_value(jnp.zeros((4, 4)))


def replace_array(model):
    model.array = jnp.ones((2, 2))


def other_object(_):
    nnx.Linear(1, 1, rngs=nnx.Rngs(0)).bias = None


@pytest.mark.parametrize(
    "change", [set_value, set_other_shape, replace_array, other_object]
)
def test_survey_holds_while_only_values_change(change):
    model = Model()
    survey = survey_of(model)
    change(model)
    assert survey.holds()
    assert survey.holds()


CHANGES = {
    "set": lambda m: setattr(m, "new", 1),
    "delete": lambda m: delattr(m, "tag"),
    "static": lambda m: setattr(m, "tag", Tag("b")),
    "equal static": lambda m: setattr(m, "tag", Tag("a")),
    "property": lambda m: setattr(m, "name", "other"),
    "class": lambda m: setattr(m.layers[0], "__class__", Named),
    "array to variable": lambda m: setattr(m, "array", nnx.Param(jnp.ones(3))),
    "variable": lambda m: setattr(m, "kernel", nnx.Param(jnp.ones(2))),
    "metadata": lambda m: m.kernel.set_metadata(tag=1),
    "metadata in place": lambda m: m.kernel.sizes.append(3),
    "ref": lambda m: m.kernel.set_raw_value(jax.new_ref(jnp.ones(2))),
    "deep": lambda m: setattr(m.layers[0], "bias", None),
    "list append": lambda m: m.layers.append(1),
    "list item": lambda m: m.layers.__setitem__(0, nnx.Param(jnp.ones(1))),
    "list pop": lambda m: m.layers.pop(),
    "dict item": lambda m: m.heads.__setitem__("b", 1),
    "dict delete": lambda m: m.heads.__delitem__("a"),
    "plain append": lambda m: m.plain.append(2),
    "plain item": lambda m: m.plain.__setitem__(0, nnx.Param(jnp.ones(1))),
    "plain static": lambda m: m.plain.__setitem__(1, 1001),
    "plain array": lambda m: m.plain.__setitem__(2, jnp.ones(1)),
    "plain dict": lambda m: m.by_name.__setitem__("z", jnp.ones(1)),
    "plain dict value": lambda m: m.by_name.__setitem__("x", nnx.Param(jnp.ones(1))),
    "plain dict key": lambda m: m.by_name.__setitem__("w", m.by_name.pop("y")),
    "state item": lambda m: m.state[0]["a"].__setitem__("b", nnx.Param(jnp.ones(1))),
    "state array": lambda m: m.state[0]["a"].__setitem__("b", jnp.ones(1)),
    "state float": lambda m: m.state[0]["a"].__setitem__("b", 1.0),
    "state type": lambda m: m.state[0]["a"].__setitem__("b", nnx.Cache(jnp.ones(1))),
    "state key": lambda m: m.state[0]["a"].__setitem__("c", m.state[0]["a"].pop("b")),
    "state new": lambda m: m.state[0].__setitem__("c", nnx.Param(jnp.ones(1))),
    "other pytree": lambda m: setattr(m.pair, "a", nnx.Param(jnp.ones(1))),
    "hash": lambda m: setattr(m.tag, "name", "b"),
    "hash in a tuple": lambda m: setattr(m.tags[1], "name", "b"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_survey_sees_every_change_of_structure(change):
    model = Model()
    survey = survey_of(model)
    assert survey.holds()
    change(model)
    assert not survey.holds()


# After these, other static values may come again.
STATICS = "static", "equal static", "property", "metadata in place"
STATICS += "hash", "hash in a tuple"


@pytest.mark.parametrize("name", CHANGES)
def test_survey_tells_other_static_values_from_other_structure(name):
    model = Model()
    survey = survey_of(model)
    assert survey.may_hold_again()
    CHANGES[name](model)
    assert survey.may_hold_again() is (name in STATICS)


def test_survey_holds_again_after_a_change_back():
    model = Model()
    survey, tag = survey_of(model), model.tag
    model.tag, model.name = Tag("b"), "other"
    assert not survey.holds()
    model.tag = tag
    assert not survey.holds()
    model.name = "model"
    assert survey.holds()
    assert survey.holds()
    tag.name = "b"
    assert not survey.holds()


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_survey_that_holds_again_sees_every_change(change):
    model = Model()
    survey = survey_of(model)
    for part in (model, model.layers, model.layers[0], model.heads):
        nnx.touch(part)
    assert survey.holds()
    change(model)
    assert not survey.holds()


def test_nodes_without_stamps_are_compared():
    class Node:
        pass

    nnx.graphlib.register_graph_node_type(
        Node,
        lambda node: (sorted(vars(node).items()), None),
        setattr,
        lambda node, key: vars(node).pop(key),
        lambda _: Node(),
        lambda node: vars(node).clear(),
        lambda node, items: vars(node).update(items),
    )
    model, node = Model(), Node()
    model.node = nnx.data(node)
    survey = survey_of(model)
    assert survey.is_complete and survey.holds()
    node.a = nnx.Param(jnp.ones(1))
    assert not survey.holds()
    survey = survey_of(model)
    assert survey.is_complete and survey.holds()
    node.a[...] = jnp.zeros(1)
    assert survey.holds()
    # It may be replaced at any time, and nobody but the type knows where it is.
    node.b = jnp.ones(1)
    assert not survey_of(model).is_complete
    model.node = nnx.data([node])
    assert not survey_of(model).is_complete


def test_survey_keeps_no_object_alive():
    model = Model()
    survey = survey_of(model)
    gone = weakref.ref(model), weakref.ref(model.layers)
    del model
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert survey.is_complete


def test_survey_tells_that_its_containers_refer_to_an_object():
    model, child = nnx.Module(), nnx.Module()
    model.children = nnx.data([child])
    assert not survey_of(model).reaches([model])
    child.deep = nnx.Dict(parent=model)
    assert survey_of(model).reaches([model])
    assert not survey_of(model).reaches([nnx.Module()])


def test_attribute_reads_what_is_there_now():
    model = Model()
    place = freshness.attribute_at([model], (0, "array"))
    assert place is not None
    model.array = array = jnp.ones(5)
    assert place.read() is array
    assert freshness.attribute_at([model], (0, "plain", 2)) is None
