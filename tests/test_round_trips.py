"""The laws of all round trips, on random object graphs.

An object that is taken apart and put together again has the same types, statuses,
static values and the same sharing; what is taken apart is never changed. So it is with
states that are made flat or pure, pickled, saved, or exported.
"""

import copy
import pathlib
import pickle
import tempfile

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import export

import graftree as nnx
from tests import comparisons, strategies, zoo

GRAPHS = strategies.graphs()
TREES = strategies.graphs(trees=True)
EITHER = st.one_of(st.tuples(GRAPHS, st.just(True)), st.tuples(TREES, st.booleans()))
SOME = strategies.examples(25, 60)
FEW = strategies.examples(8, 40)  # each writes a file, or compiles


def law(strategy, settings=SOME):
    """Makes a test of a law, on random examples."""
    return lambda test: settings(hypothesis.given(strategy)(test))


def law_of_all(*others):
    """The same for graphs, and trees in both modes, as ``(node, graph, ...)``."""

    def decorate(test):
        def on_examples(case, given):
            test(*case, *given)

        on_examples.__name__ = test.__name__
        return SOME(hypothesis.given(EITHER, st.tuples(*others))(on_examples))

    return decorate


# --------------------------------------------------------------- split and merge


@law_of_all()
def test_merge_undoes_split(node, graph):
    before = comparisons.snapshot(node)
    graphdef, state = nnx.split(node, graph=graph)
    pairs = comparisons.check_same(node, nnx.merge(graphdef, state))
    assert all(a is b for a, b in comparisons.variables_of(pairs))
    assert not any(a is b for a, b in comparisons.nodes_of(pairs))
    assert comparisons.snapshot(node) == before


@law_of_all()
def test_merge_with_copy_shares_no_variable(node, graph):
    merged = nnx.merge(*nnx.split(node, graph=graph), copy=True)
    pairs = comparisons.check_same(node, merged)
    assert not any(a is b for a, b in pairs)


@law_of_all()
def test_a_graphdef_is_what_it_lists(node, graph):
    graphdef = nnx.graphdef(node, graph=graph)
    listed = graphdef.nodes, graphdef.attributes, graphdef.num_leaves
    assert nnx.GraphDef(*listed) == graphdef


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("node", [1.0, np.ones(2), nnx.Param(1.0), None, [1, "a"]])
def test_a_graphdef_of_a_leaf_or_container_is_what_it_lists(node, graph):
    graphdef = nnx.graphdef(node, graph=graph)
    listed = graphdef.nodes, graphdef.attributes, graphdef.num_leaves
    assert nnx.GraphDef(*listed) == graphdef
    assert len(graphdef.attributes) >= (graphdef.num_leaves if not graph else 0)


KINDS = [nnx.BatchStat, zoo.Kind, nnx.Variable, nnx.PathContains("a"), None]
FILTERS = st.lists(st.sampled_from(KINDS), max_size=3)


@law_of_all(FILTERS, st.randoms(use_true_random=False))
def test_states_of_any_filters_merge_in_any_order(node, graph, filters, random):
    graphdef, *states = nnx.split(node, *filters, ..., graph=graph)
    random.shuffle(states)
    comparisons.check_same(node, nnx.merge(graphdef, *states))


@law_of_all()
def test_state_leaves_are_those_of_the_object_sorted_by_path(node, graph):
    _, flat = nnx.flatten(node, graph=graph)
    for path, leaf in flat:
        assert comparisons.reached(node, path) is leaf
    order = [[(isinstance(k, str), str(type(k)), k) for k in p] for p in flat.paths]
    assert order == sorted(order)


@law_of_all()
def test_flatten_and_unflatten_with_and_without_paths(node, graph):
    graphdef, flat = nnx.flatten(node, graph=graph)
    comparisons.check_same(node, nnx.unflatten(graphdef, flat))
    graphdef, leaves = nnx.flatten(node, with_paths=False, graph=graph)
    comparisons.check_same(node, nnx.unflatten(graphdef, leaves))
    comparisons.check_same(node, nnx.merge(graphdef, leaves))
    comparisons.check_same(node, nnx.merge(nnx.unpack(node, graph=graph)))


# ------------------------------------------------------------------------- states


@law_of_all(FILTERS)
def test_flat_and_split_states_come_back_with_their_leaves(node, graph, filters):
    state = nnx.state(node, graph=graph)
    flat = nnx.to_flat_state(state)
    parts = nnx.split_state(state, *filters, ...)
    parts = parts if isinstance(parts, tuple) else (parts,)
    for again in (
        nnx.from_flat_state(flat),
        flat.to_nested_state(),
        nnx.merge_state(*parts),
        nnx.map_state(lambda path, leaf: leaf, state),
    ):
        comparisons.check_same(state, again)


@law(strategies.graphs(refs=False))
def test_pure_dicts_merge_and_replace(node):
    graphdef, state = nnx.split(node)
    pure = nnx.to_pure_dict(state)
    comparisons.check_same(node, nnx.merge(graphdef, pure), comparisons.same_value)
    other = nnx.map_state(shifted_leaf, state)
    nnx.replace_by_pure_dict(other, pure)
    comparisons.check_same(state, other, comparisons.same_value)


def same_leaves(a, b):
    """Whether two states have the same structure, types of arrays and numbers."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x.dtype == y.dtype and np.array_equal(x, y) for x, y in pairs
    )


@law(strategies.graphs(refs=False), FEW)
def test_checkpoints_restore_states(node):
    state = nnx.state(node, nnx.Variable)
    hypothesis.assume(jax.tree.leaves(state))
    with tempfile.TemporaryDirectory() as parent:
        folder = pathlib.Path(parent, "saved")
        try:
            nnx.checkpoints.save(folder, state)
        except ValueError as error:
            assert "name" in str(error) and not folder.exists()
            return
        like = jax.tree.map(lambda x: x * 0, state)
        assert same_leaves(nnx.checkpoints.restore(folder, like), state)


@law(strategies.graphs(refs=False), FEW)
def test_exported_functions_take_and_return_states(node):
    pytest.importorskip("flatbuffers")
    state = nnx.state(node, nnx.Variable)
    written = export.export(jax.jit(lambda x: x))(state).serialize()
    assert same_leaves(export.deserialize(written).call(state), state)


# --------------------------------------------------------------- equal structures


@law_of_all()
def test_copies_have_equal_graphdefs(node, graph):
    graphdef = nnx.graphdef(node, graph=graph)
    other = nnx.graphdef(nnx.clone(node, graph=graph), graph=graph)
    assert graphdef == other and not graphdef != other
    try:
        hash(graphdef)
    except TypeError:
        return
    assert hash(graphdef) == hash(other)


@law(TREES)
def test_graph_and_tree_graphdefs_differ(node):
    assert nnx.graphdef(node, graph=True) != nnx.graphdef(node, graph=False)


@law_of_all()
def test_added_attributes_change_the_graphdef(node, graph):
    before = nnx.graphdef(node, graph=graph)
    node.new = 5
    changed = nnx.graphdef(node, graph=graph)
    node.new = 6
    assert before != changed != nnx.graphdef(node, graph=graph)


@law_of_all()
def test_graphdefs_and_states_survive_pickle_and_deepcopy(node, graph):
    graphdef, state = nnx.split(node, graph=graph)
    assert copy.deepcopy(graphdef) == graphdef
    assert pickle.loads(pickle.dumps(graphdef)) == graphdef
    flat = nnx.to_flat_state(state)
    for copied in (
        copy.deepcopy(state),
        pickle.loads(pickle.dumps(state)),
        copy.deepcopy(flat).to_nested_state(),
        pickle.loads(pickle.dumps(flat)).to_nested_state(),
    ):
        comparisons.check_same(state, copied, comparisons.same_value)


# ------------------------------------------------------------------------ copies


@law_of_all()
def test_clone_shares_arrays_only(node, graph):
    before = comparisons.snapshot(node)
    pairs = comparisons.check_same(node, nnx.clone(node, graph=graph))
    assert not any(a is b for a, b in pairs)
    assert comparisons.snapshot(node) == before


@law_of_all()
def test_clone_can_share_variables(node, graph):
    pairs = comparisons.check_same(node, nnx.clone(node, variables=False, graph=graph))
    assert all(a is b for a, b in comparisons.variables_of(pairs))
    assert not any(a is b for a, b in comparisons.nodes_of(pairs))


def is_copied_array(a, b):
    if isinstance(a, jax.Array):
        assert a.unsafe_buffer_pointer() != b.unsafe_buffer_pointer()
        return comparisons.same_value(a, b)
    return a is b


@law_of_all()
def test_clone_with_arrays_shares_no_buffer(node, graph):
    comparisons.check_same(
        node, nnx.clone(node, arrays=True, graph=graph), is_copied_array
    )


@law(GRAPHS)
def test_deepcopy_keeps_sharing_inside(node):
    before = comparisons.snapshot(node)
    pairs = comparisons.check_same(node, copy.deepcopy(node), comparisons.same_value)
    assert not any(a is b for a, b in pairs)
    assert comparisons.snapshot(node) == before


@law(GRAPHS)
def test_pickle_keeps_sharing_inside(node):
    comparisons.check_same(
        node, pickle.loads(pickle.dumps(node)), comparisons.same_value
    )


# --------------------------------------------------------------------- JAX trees


@law(TREES)
def test_jax_flattens_trees(node):
    before = comparisons.snapshot(node)
    leaves, treedef = jax.tree.flatten(node)
    pairs = comparisons.check_same(node, jax.tree.unflatten(treedef, leaves))
    tracked = comparisons.nodes_of(pairs) + comparisons.variables_of(pairs)
    assert not any(a is b for a, b in tracked)
    assert comparisons.snapshot(node) == before


@law(TREES)
def test_equal_trees_have_equal_treedefs(node):
    copied = nnx.clone(node, graph=False)
    assert jax.tree.structure(node) == jax.tree.structure(copied)


@law(TREES)
def test_tree_state_has_the_leaves_that_jax_sees(node):
    seen, listed = (jax.tree.leaves(x) for x in (node, nnx.state(node, graph=False)))
    assert sorted(map(id, seen)) == sorted(map(id, listed))


# ------------------------------------------------------------------ update and pop


def shifted(x):
    return x + 1 if isinstance(x, (jax.Array, np.ndarray, np.generic)) else x


def shifted_leaf(path, leaf):
    if isinstance(leaf, nnx.Variable):
        raw = leaf.get_raw_value()
        raw = raw[...] if comparisons.is_ref(raw) else raw
        return leaf.copy(jax.tree.map(shifted, raw))
    return shifted(leaf)


@law_of_all()
def test_update_writes_every_variable_in_place(node, graph):
    _, state, _ = nnx.split(node, nnx.Variable, ..., graph=graph)
    raw = [(v, v.get_raw_value()) for _, v in nnx.to_flat_state(state)]
    changed = nnx.map_state(shifted_leaf, state)
    structure = nnx.graphdef(node, graph=graph)
    nnx.update(node, changed)
    assert nnx.graphdef(node, graph=graph) == structure
    for path, leaf in nnx.to_flat_state(changed):
        written = comparisons.reached(node, path)
        assert written is not leaf
        values = leaf.get_value(), written.get_value()
        comparisons.check_same(*values, comparisons.same_value)
    assert all(v.get_raw_value() is r for v, r in raw if comparisons.is_ref(r))


@law_of_all()
def test_update_by_the_own_state_changes_nothing(node, graph):
    before = comparisons.snapshot(node)
    nnx.update(node, nnx.state(node, nnx.Variable, graph=graph))
    assert comparisons.snapshot(node) == before


@law(GRAPHS)
def test_pop_removes_what_it_returns_or_changes_nothing(node):
    before = comparisons.snapshot(node)
    expected = nnx.state(node, nnx.Variable)
    try:
        popped = nnx.pop(node, nnx.Variable)
    except ValueError as error:
        assert "Cannot pop key" in str(error)
        assert comparisons.snapshot(node) == before
        return
    found, listed = nnx.to_flat_state(popped), nnx.to_flat_state(expected)
    assert found.paths == listed.paths
    assert all(a is b for a, b in zip(found.leaves, listed.leaves, strict=True))
    for path in found.paths:
        assert path[-1] not in comparisons.keys_of(comparisons.reached(node, path[:-1]))


@law(strategies.graphs(trees=True, refs=False))
def test_update_undoes_pop(node):
    original = nnx.clone(node)
    try:
        popped = nnx.pop(node, nnx.Variable)
    except ValueError:
        hypothesis.reject()
    nnx.update(node, popped)
    comparisons.check_same(nnx.state(original), nnx.state(node))


# --------------------------------------------------------------------- traversals


@law_of_all()
def test_map_with_the_identity_is_merge(node, graph):
    mapped = nnx.map(lambda path, leaf: leaf, node, graph=graph)
    pairs = comparisons.check_same(node, mapped)
    assert all(a is b for a, b in comparisons.variables_of(pairs))


@law_of_all()
def test_recursive_map_with_the_identity_copies_nodes(node, graph):
    before = comparisons.snapshot(node)
    try:
        mapped = nnx.recursive_map(lambda path, x: x, node, graph=graph)
    except ValueError as error:
        assert graph and "Found cycle in the graph at path" in str(error)
    else:
        pairs = comparisons.check_same(node, mapped)
        assert all(a is b for a, b in comparisons.variables_of(pairs))
        assert not any(a is b for a, b in comparisons.nodes_of(pairs))
    assert comparisons.snapshot(node) == before


@law_of_all()
def test_iter_graph_meets_each_leaf_at_its_path(node, graph):
    met = dict(nnx.iter_graph(node, graph=graph))
    for path, leaf in nnx.flatten(node, graph=graph)[1]:
        assert met[path] is leaf
    assert list(met)[-1] == () and met[()] is node


def all_paths(node):
    """The data paths of each object that may be shared, by a search of our own."""
    found = {}

    def walk(x, path):
        if comparisons.is_tracked(x) or isinstance(x, (jax.Array, np.ndarray)):
            found.setdefault(id(x), []).append(path)
            if len(found[id(x)]) > 1:
                return
        if isinstance(x, nnx.Variable):
            return
        statuses = x._pytree__nodes if isinstance(x, nnx.Pytree) else {}
        children = comparisons.children(x)
        for key, (name, child) in zip(comparisons.keys_of(x), children, strict=True):
            if statuses.get(name, True):
                walk(child, (*path, key))

    walk(node, ())
    return found.values()


@law(GRAPHS)
def test_find_duplicates_finds_all_that_is_shared(node):
    counts = [len(paths) for paths in all_paths(node) if len(paths) > 1]
    groups = nnx.find_duplicates(node)
    assert sorted(map(len, groups)) == sorted(counts)
    for group in groups:
        assert len({id(comparisons.reached(node, path)) for path in group}) == 1


def test_an_empty_module_survives(graph):
    node = zoo.Box()
    comparisons.check_same(node, nnx.merge(*nnx.split(node, graph=graph)))
