"""What is taken apart again comes from memory, and never as it was before a change.

The oracle is the law that merge undoes split, to the very objects: it holds after
anything that was done to an object whose parts are remembered. And a compiled function
is traced again for another skeleton only. At the end the functional API.
"""

import copy
import dataclasses
import gc
import pickle
import re
import weakref

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

import graftree as nnx
from graftree.core import ownership
from tests import changes, comparisons, static_values, strategies, tables, zoo
from tests.changes import ONES, STATICS, VALUES, ZEROS, Hidden, Model, made, param

OTHER = zoo.Scale()


WHOLES = pytest.mark.parametrize(
    "whole",
    [lambda m: m, lambda m: {"model": m, "more": [OTHER]}],
    ids=["alone", "beside"],
)
VERY_SAME = pytest.mark.caches("it asks for the very same GraphDef")
KINDS = pytest.mark.parametrize(
    ("kind", "graph"),
    [(Model, True), (Model, False), (Hidden, True)],
    ids=["graph", "tree", "no pytree"],
)


OTHERS = STATICS | changes.OBJECTS | changes.STRUCTURES
OTHERS["ref"] = lambda m, k: m.kernel.set_raw_value(jax.new_ref(ONES))
CHANGES = VALUES | OTHERS


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
    assert graphdefs[1] is graphdefs[2] or not nnx.config.graftree_caches
    return graphdefs[2]


@VERY_SAME
@KINDS
@WHOLES
@pytest.mark.parametrize("name", CHANGES)
def test_an_object_comes_from_memory_if_it_is_as_it_was(whole, kind, graph, name):
    model = made(kind)
    before = remembered(whole(model), graph)
    CHANGES[name](model, 0)
    for told in (checked, remembered):
        assert (told(whole(model), graph) is before) is (name in VALUES)


@pytest.mark.parametrize("name", CHANGES)
def test_compiled_functions_are_traced_for_another_structure_only(name, graph):
    model, traced = made(), []
    f = nnx.jit(lambda m: traced.append(nnx.graphdef(m, graph=graph)), graph=graph)
    for _ in range(3):
        f(model), nnx.split(model, graph=graph)
    before = nnx.graphdef(model, graph=graph)
    CHANGES[name](model, 0)
    f(model)
    after = nnx.graphdef(model, graph=graph)
    assert len(traced) == 1 + (after != before or name in changes.TYPES)
    equal = VALUES.keys() | changes.OBJECTS.keys()
    equal |= set() if graph else changes.DATA_IN_TREES
    assert (after == before) is (name in equal)


def test_another_class_is_seen(graph):
    model = made()
    remembered(model, graph)
    model.__class__ = zoo.Box
    assert nnx.merge(*nnx.split(model, graph=graph)).__class__ is zoo.Box


@VERY_SAME
@tables.cases(
    "value, other, is_same",
    (0.0, -0.0, False),
    (0.0, float("0.0"), True),
    (complex(0, 0.0), complex(0, -0.0), False),
    (float("nan"), float("nan"), False),
)
def test_signs_of_zeros_and_nans_are_told_apart(value, other, is_same, graph):
    model = zoo.Box(rate=value)
    before = [nnx.graphdef(model, graph=graph) for _ in range(3)][-1]
    model.rate = other
    assert (nnx.graphdef(model, graph=graph) is before) is is_same


@VERY_SAME
@WHOLES
@pytest.mark.parametrize("name", [*STATICS, "object", "equal object"])
def test_static_values_that_take_turns_are_remembered(whole, graph, name):
    model, change = made(), (STATICS | OTHERS)[name]
    kept = dict(vars(model))
    first = remembered(whole(model), graph)
    change(model, 0)
    second = remembered(whole(model), graph)
    for key in ("flag", "rate", "none", "tag", "_name"):
        setattr(model, key, kept[key])
    assert checked(whole(model), graph) is first
    change(model, 0)
    assert (checked(whole(model), graph) is second) is (name in STATICS)


@VERY_SAME
def test_a_static_value_that_came_again_may_still_change_in_place(graph):
    model = made()
    tag, before = model.tag, remembered(model, graph)
    for value in (static_values.Tag("b"), tag):
        model.tag = value
        assert (checked(model, graph) is before) is (value is tag)
    tag.name = "b"
    assert checked(model, graph) is not before


@KINDS
@strategies.examples(30, 300)
@given(data=st.data())
def test_whatever_is_done_to_an_object_it_is_told_as_it_is(kind, graph, data):
    model, known = made(kind), [*VALUES.values(), *STATICS.values()]
    remembered(model, graph)
    for change in data.draw(st.lists(st.sampled_from(known), max_size=6)):
        change(model, 0)
        checked(model, graph)


@WHOLES
def test_leaves_are_a_new_list_each_time(whole, graph):
    model = made()
    remembered(whole(model), graph)
    leaves = [nnx.flatten(whole(model), with_paths=False, graph=graph)[1] for _ in "ab"]
    leaves[0].clear()
    assert len(leaves[1]) > 0


@VERY_SAME
def test_modes_have_memories_of_their_own():
    model = made()
    graphdefs = [nnx.graphdef(model, graph=graph) for graph in [True, False] * 3]
    assert graphdefs[4] is graphdefs[2] != graphdefs[3] is graphdefs[5]


def test_shared_variables_are_refused_in_tree_mode_also_late():
    model, other = made(), made()
    remembered((model, other), graph=False)
    for sharing, refused in ((other, (model, other)), (model, model)):
        sharing.again = model.kernel
        for _ in range(3):
            with pytest.raises(ValueError, match="again"):
                nnx.split(refused, graph=False)
            checked(refused, graph=True)


def test_copies_and_references_have_no_memory_of_the_original():
    model, array = made(), jnp.ones((2, 3))
    model.ref = nnx.data(weakref.ref(model.child))
    remembered(model, graph=True)
    clone = nnx.clone(model)
    clone.array = array
    checked(clone, graph=True)
    assert nnx.state(clone)["array"] is array is not nnx.state(model)["array"]
    model.ref = model.child
    checked(model, graph=True)


def test_members_of_a_container_may_change_places(graph):
    pair = [made(), made()]
    for _ in range(3):
        for node in (pair, (*pair,), pair[::-1], [pair[0], made()], [pair[0]]):
            checked(node, graph)


@pytest.mark.parametrize("kind", [Model, Hidden])
@WHOLES
def test_the_memory_keeps_nothing_alive(whole, kind):
    model, other = made(kind), made(kind)
    model.array, model.others = jnp.zeros(2), nnx.data([other])
    remembered(whole(model), graph=True)
    for _ in range(3):
        nnx.split((model, other))
    array = weakref.ref(model.array)
    model.array = jnp.zeros(2)
    gc.collect()
    assert array() is None
    kept = (model, other, other.kernel, model.child, model.layers, model.array)
    gone = [weakref.ref(x) for x in kept]
    del model, other, kept
    gc.collect()
    assert [x() for x in gone] == [None] * len(gone)


class Registered:
    """An object without versions; a function of its own runs when it is listed."""

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
        lambda: setattr(model, "node", nnx.data({0: node})),
        lambda: setattr(node, "b", ONES),
    ):
        change()
        for _ in range(3):
            listed = nnx.state(model)["node"]
            listed = listed if isinstance(model.node, Registered) else listed[0]
            assert {k: id(x) for k, x in listed.items()} == {
                k: id(x) for k, x in vars(node).items() if k != "run"
            }


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Tagged:
    """A pytree with static data."""

    array: jax.Array
    tag: object = dataclasses.field(metadata={"static": True})


class Node(Tagged):
    """The same as a graph node, whose metadata is the tag."""


nnx.graphlib.register_graph_node_type(
    Node,
    lambda node: ([("array", node.array)], node.tag),
    setattr,
    lambda node, key: vars(node).pop(key),
    lambda tag: Node(None, tag),
    lambda node: vars(node).clear(),
    lambda node, items: vars(node).update(items),
)


@tables.cases("kind, graph", (Tagged, True), (Tagged, False), (Node, True))
def test_equal_tags_of_registered_types_are_told_apart(kind, graph):
    model = zoo.Box(part=nnx.data(kind(param(), 3)))
    for tag in (3, 3, 3, 3.0, 3.0, 3, True, 1, 0.0, -0.0):
        model.part.tag = tag
        rebuilt = nnx.merge(*nnx.split(model, graph=graph))
        for copied in (rebuilt, nnx.clone(model, graph=graph)):
            assert repr(copied.part.tag) == repr(tag)


def test_a_change_while_an_object_is_taken_apart_is_seen_the_next_time():
    node = Registered()
    node.a = param()
    model = zoo.Box(k=1, node=nnx.data(node))
    nnx.graphdef(model)
    node.run = lambda: setattr(model, "k", 2)  # `k` was read before
    nnx.graphdef(model)
    node.run = lambda: None
    assert nnx.merge(*nnx.split(model)).k == 2


def test_a_change_is_seen_if_another_thread_writes_its_version_last():
    # Issue 12, §7: both change the model; one takes its number before the model is
    # taken apart, and is interrupted before it writes it until the other is through.
    model, other = made(), zoo.Box(late=1)
    zoo.Box(later=1)
    before = remembered(model, graph=True)
    model.tag = static_values.Tag("b")
    model._pytree__state.version = other._pytree__state.version
    ownership.versions.latest = other._pytree__state.version
    assert checked(model, graph=True) is not before


def test_making_objects_from_a_state_is_no_structural_change():
    graphdef, state = nnx.split(made())
    before = ownership.versions.latest
    nnx.merge(graphdef, state)
    assert ownership.versions.latest == before


@tables.cases(
    "exchange, is_ref",
    (lambda v, ref: v.set_raw_value(ref), False),
    (lambda v, ref: v.set_raw_value(ref), True),
    (lambda v, ref: v.copy_from(v.from_metadata(ref, v.get_metadata())), True),
)
def test_another_ref_is_written_once_it_was_exchanged(exchange, is_ref):
    v, ref = nnx.Variable(ZEROS, ref=is_ref), jax.new_ref(ONES)
    increment = nnx.jit(lambda v: v.set_value(v + 1))
    for _ in range(3):
        increment(v)
    exchange(v, ref)
    increment(v)
    assert v.get_raw_value() is ref and ref[...].tolist() == [2.0, 2.0]


def test_abstract_variables_get_refs_when_they_are_filled():
    v = nnx.Variable(jax.ShapeDtypeStruct((2,), jnp.float32), ref=True)
    for _ in range(3):
        nnx.split(nnx.Dict(v=v))
    before = nnx.graphdef(nnx.Dict(v=v))
    v.update_from_state(nnx.Variable(ZEROS))
    assert isinstance(v.get_raw_value(), jax.Ref)
    assert nnx.graphdef(nnx.Dict(v=v)) != before


# ------------------------------------------------------------------- the functional API


def a_param(value=1.0):
    return nnx.Param(jnp.array(value))


# ---------------------------------------------------------------- GraphDef, GraphState


def test_graphdefs_compare_by_content():
    assert nnx.graphdef(jax.eval_shape(zoo.Parts)) == nnx.graphdef(zoo.Parts()) != "x"
    one, alike, other = (
        nnx.graphdef(nnx.Dict(a=nnx.Param(1, scale=np.array(x))))
        for x in ([1, 2], [1, 2], [1, 3])
    )
    assert one == alike != other


def test_parts_of_a_graphdef_print_their_types_by_name():
    text = repr(nnx.graphdef(zoo.Tied()))
    for part in ("NodeDef(type='Tied', index=0", "VariableDef(type='Param'"):
        assert part in text
    assert "NodeRef(index=1)" in text and "num_leaves=2" in text


@tables.cases(
    "copied, value",
    (copy.copy, 1.0),
    (copy.deepcopy, 1.0),
    (lambda x: pickle.loads(pickle.dumps(x)), 1.0),
    (lambda x: x | nnx.State({"a": a_param(7.0)}), 7.0),
    ids=["copy", "deepcopy", "pickle", "union with a State"],
)
def test_copies_of_graph_states_are_graph_states(copied, value):
    made = copied(nnx.unpack(nnx.Dict(a=a_param(), b=nnx.Dict(c=jnp.array(2.0)))))
    assert type(made) is nnx.GraphState and nnx.merge(made).a[...] == value


def test_a_call_of_a_part_gives_the_pair_of_the_whole():
    pair = nnx.split(nnx.Dict(parts=nnx.List([zoo.Counter(), zoo.Counter()])))
    _, new = nnx.call(pair).parts[1]()
    assert [x.count.item() for x in nnx.merge(*new).parts] == [0, 1]


# --------------------------------------------------------------------------- merging


@tables.cases(
    "change, phrase",
    (lambda state: state.pop("b"), "missing: b/0"),
    (lambda state: state.update(c=1), "unexpected: c"),
    (lambda state: state.update(x=state.pop("a")), "unexpected: x"),
)
def test_wrong_paths_are_named(change, phrase):
    pair = nnx.List([a_param(), a_param()])
    graphdef, state = nnx.split(nnx.Dict(a=a_param(), b=pair))
    pure = nnx.to_pure_dict(state)
    change(pure)
    with pytest.raises(ValueError, match=phrase):
        nnx.merge(graphdef, pure)


@pytest.mark.parametrize("root", [jnp.array(1.0), a_param()])
def test_a_single_leaf_comes_back_from_a_flat_state(root):
    # Issue 12: the FlatState itself was taken for the leaf.
    graphdef, flat = nnx.flatten(root)
    assert nnx.merge(graphdef, flat) is root
    with pytest.raises(ValueError, match="unexpected: a"):
        nnx.merge(graphdef, nnx.FlatState([(("a",), root)], sort=True))


def test_ref_maps_forget_what_is_deleted():
    keys = [1], [1]
    refs = nnx.graphlib.RefMap([(keys[0], 0), (keys[1], 1)])
    assert refs.get([1]) is None
    del refs[keys[0]]
    assert keys[0] not in refs and next(iter(refs)) is keys[1] and len(refs) == 1


def refill(box, change):
    """Takes a changed copy of an object apart; what is made of it refills the object.

    The skeleton, the leaves, and the objects outside by the number that they have.
    """
    refs, objects = nnx.graphlib.RefMap(), nnx.graphlib.IndexMap()
    graphdef, leaves = nnx.flatten(box, ref_index=refs)
    copied = [leaf.copy() for leaf in leaves.leaves]
    inner = nnx.unflatten(graphdef, copied, index_ref=objects)
    change(inner)
    outer = nnx.graphlib.RefMap.from_indexmap(objects)
    existing = nnx.graphlib.IndexMap.from_refmap(refs)
    return (*nnx.flatten(inner, ref_outer_index=outer), existing)


def test_existing_objects_share_what_their_copies_share():
    def change(inner):
        inner.a[...] = 5.0
        inner.b, inner.c = inner.a, 3

    box = zoo.Node(a=a_param())
    variable = box.a
    graphdef, leaves, existing = refill(box, change)
    assert not hasattr(box, "c") and variable[...] == 1.0
    assert nnx.unflatten(graphdef, leaves, outer_index_outer_ref=existing) is box
    assert box.a is box.b is variable and variable[...] == 5.0 and box.c == 3


def test_a_refill_that_fails_changes_nothing():
    box = zoo.Node(a=a_param())
    graphdef, leaves, existing = refill(box, lambda inner: setattr(inner, "c", 1))

    def inside():
        nnx.unflatten(graphdef, leaves, outer_index_outer_ref=existing)

    with pytest.raises(nnx.errors.TraceContextError):
        jax.jit(inside)()
    assert not hasattr(box, "c")


# -------------------------------------------------------------------------- traversals


@strategies.examples(30, 200)
@hypothesis.given(strategies.graphs())
def test_modules_are_listed_as_by_a_walk_over_all(root):
    walk = [(path, x) for path, x in nnx.iter_graph(root) if isinstance(x, nnx.Module)]
    found = [*nnx.iter_modules(root)]
    assert [path for path, _ in found] == [path for path, _ in walk]
    assert all(a is b for (_, a), (_, b) in zip(found, walk, strict=True))


def test_walks_do_not_touch_what_they_visit():
    rngs = nnx.Rngs(0)
    [*nnx.iter_graph(rngs), *nnx.iter_modules(nnx.Dict(rngs=rngs))]
    assert rngs.default.count[...] == 0


# ------------------------------------------------------------------------------- trees


def test_cycles_are_found():
    root = nnx.Dict(a=nnx.Dict())
    root.a.b = root
    with pytest.raises(ValueError, match="(?s)Cycle.*Dict.*found at paths.*<root>"):
        nnx.split(root, graph=False)
    items = [1]
    root = nnx.Dict(a=nnx.data(items))
    items.append(items)
    with pytest.raises(ValueError, match="Cycle"):
        nnx.split(root, graph=False)


# -------------------------------------------------------------------------- differences


def model():
    parts = nnx.List([nnx.Param(jnp.ones(1))])
    return zoo.Box(rate=0.5, weight=nnx.Param(jnp.ones(2), tag="x"), parts=parts)


def put(name, make):
    """Sets an attribute of a model to something new."""
    return lambda model: setattr(model, name, make())


def lines(change, graph=True):
    """How a model differs from a changed one."""

    def changed():
        other = model()
        change(other)
        return other

    try:
        nnx.cond(True, model, changed, graph=graph)
    except TypeError as error:
        return re.findall("^  - out(.*)", str(error), re.MULTILINE)
    return []


DIFFERENCES = {
    ".rate: 0.5 in true_fun, 1.0 in false_fun": put("rate", lambda: 1.0),
    ".rate: 0.5 in true_fun, nothing in false_fun": lambda m: delattr(m, "rate"),
    ".new: nothing in true_fun, an array in false_fun": put("new", lambda: ONES),
    ".parts[0]: a Param in true_fun, a BatchStat in false_fun": lambda m: (
        m.parts.__setitem__(0, nnx.BatchStat(jnp.ones(1)))
    ),
    ".weight, metadata 'tag': 'x' in true_fun, 'y' in false_fun": lambda m: (
        m.weight.set_metadata(tag="y")
    ),
    ".weight: a Param in true_fun, a Box in false_fun": put("weight", model),
    ".z: nothing in true_fun, a known object: out/weight in false_fun": lambda m: (
        setattr(m, "z", m.weight)
    ),
}


@pytest.mark.parametrize("line", DIFFERENCES)
def test_a_change_is_one_line_that_says_where_and_what(line):
    assert lines(DIFFERENCES[line]) == [line]


def test_no_change_is_no_line(graph):
    assert lines(lambda m: m.weight.set_value(jnp.zeros(2)), graph) == []


def test_values_that_python_takes_for_equal_differ():
    assert lines(lambda m: setattr(m, "rate", float("0.5"))) == []
    with pytest.raises(TypeError, match=r"out.k: 1 in true_fun, True in false_fun"):
        nnx.cond(True, lambda: zoo.Box(k=1), lambda: zoo.Box(k=True))


def test_trees_differ_in_their_leaves_too():
    changed = lines(lambda m: m.parts.append(nnx.Param(jnp.ones(1))), graph=False)
    assert any("parts[1]: nothing in true_fun, a Param" in line for line in changed)


@pytest.mark.parametrize("length", [1, 150])
def test_containers_that_contain_themselves_are_refused_in_graph_mode(length):
    top = inner = []
    for _ in range(length - 1):
        inner.append([])
        inner = inner[0]
    inner.append(top)
    end = "/".join("0" * length)
    with pytest.raises(ValueError, match=f"(?s)contains itself.*<root>\n  - {end}\n"):
        nnx.flatten(top, graph=True)
