"""split, merge, what they give, and differences: what the contract leaves open."""

import copy
import pickle
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import strategies, tables, zoo


def param(value=1.0):
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
    (lambda x: x | nnx.State({"a": param(7.0)}), 7.0),
    ids=["copy", "deepcopy", "pickle", "union with a State"],
)
def test_copies_of_graph_states_are_graph_states(copied, value):
    made = copied(nnx.unpack(nnx.Dict(a=param(), b=nnx.Dict(c=jnp.array(2.0)))))
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
    graphdef, state = nnx.split(nnx.Dict(a=param(), b=nnx.List([param(), param()])))
    pure = nnx.to_pure_dict(state)
    change(pure)
    with pytest.raises(ValueError, match=phrase):
        nnx.merge(graphdef, pure)


@pytest.mark.parametrize("root", [jnp.array(1.0), param()])
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
    return (
        *nnx.flatten(inner, ref_outer_index=outer),
        nnx.graphlib.IndexMap.from_refmap(refs),
    )


def test_existing_objects_share_what_their_copies_share():
    def change(inner):
        inner.a[...] = 5.0
        inner.b, inner.c = inner.a, 3

    box = zoo.Node(a=param())
    variable = box.a
    graphdef, leaves, existing = refill(box, change)
    assert not hasattr(box, "c") and variable[...] == 1.0
    assert nnx.unflatten(graphdef, leaves, outer_index_outer_ref=existing) is box
    assert box.a is box.b is variable and variable[...] == 5.0 and box.c == 3


def test_a_refill_that_fails_changes_nothing():
    box = zoo.Node(a=param())
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


def test_a_shared_variable_is_told_with_its_paths_and_the_ways_out():
    shared = param()
    with pytest.raises(ValueError, match=r"found at paths(.|\n)*  - .a\n  - .b.c") as e:
        nnx.split(nnx.Dict(a=shared, b=nnx.Dict(c=shared)), graph=False)
    for way_out in ("nnx.clone", "nnx.split(..., graph=True)", "nnx.compat.split"):
        assert way_out in str(e.value)


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
    return zoo.Box(
        rate=0.5,
        weight=nnx.Param(jnp.ones(2), tag="x"),
        parts=nnx.List([nnx.Param(jnp.ones(1))]),
    )


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


CHANGES = {
    ".rate: 0.5 in true_fun, 1.0 in false_fun": lambda m: setattr(m, "rate", 1.0),
    ".rate: 0.5 in true_fun, nothing in false_fun": lambda m: delattr(m, "rate"),
    ".new: nothing in true_fun, an array in false_fun": lambda m: setattr(
        m, "new", jnp.ones(1)
    ),
    ".parts[0]: a Param in true_fun, a BatchStat in false_fun": lambda m: (
        m.parts.__setitem__(0, nnx.BatchStat(jnp.ones(1)))
    ),
    ".weight, metadata 'tag': 'x' in true_fun, 'y' in false_fun": lambda m: (
        m.weight.set_metadata(tag="y")
    ),
    ".weight: a Param in true_fun, a Box in false_fun": lambda m: setattr(
        m, "weight", model()
    ),
    ".z: nothing in true_fun, a known object: out/weight in false_fun": lambda m: (
        setattr(m, "z", m.weight)
    ),
}


@pytest.mark.parametrize("line", CHANGES)
def test_a_change_is_one_line_that_says_where_and_what(line):
    assert lines(CHANGES[line]) == [line]


def test_no_change_is_no_line(graph):
    assert lines(lambda m: m.weight.set_value(jnp.zeros(2)), graph) == []


def test_values_that_python_takes_for_equal_differ():
    assert lines(lambda m: setattr(m, "rate", float("0.5"))) == []
    with pytest.raises(TypeError, match=r"out.k: 1 in true_fun, True in false_fun"):
        nnx.cond(True, lambda: zoo.Box(k=1), lambda: zoo.Box(k=True))


def test_trees_differ_in_their_leaves_too():
    changed = lines(lambda m: m.parts.append(nnx.Param(jnp.ones(1))), graph=False)
    assert any("parts[1]: nothing in true_fun, a Param" in line for line in changed)
