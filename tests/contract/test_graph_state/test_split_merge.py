"""Split, merge, state, flatten, unflatten; GraphDefs (contract sections 5 and 6)."""

import copy
import dataclasses
import math
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import tables
from tests.comparisons import raises
from tests.strategies import Block, Hidden, Node, Scale, param


def model():
    return Block(kernel=param(), bias=nnx.BatchStat(jnp.zeros(2)), size=3)


# -------------------------------------------------------------------- the aliasing rule


def test_state_leaves_are_the_own_variables(graph):
    m = model()
    _, state = nnx.split(m, graph=graph)
    assert state["kernel"] is m.kernel
    state["kernel"][...] = jnp.full(2, 9.0)
    assert m.kernel[...].tolist() == [9.0, 9.0]


def test_array_and_ref_attributes_are_the_same_objects(graph):
    m = Block(array=jnp.ones(2), numpy=np.ones(2), ref=jax.new_ref(jnp.ones(2)))
    state = nnx.state(m, graph=graph)
    for name in ("array", "numpy", "ref"):
        assert state[name] is getattr(m, name)


def test_split_takes_the_node_by_keyword():
    m = model()
    assert nnx.split(node=m)[1] == nnx.state(node=m)
    assert nnx.unpack(node=m)["kernel"] is m.kernel
    assert nnx.variables is nnx.state  # the older name


@pytest.mark.parametrize(
    "node", [(model(), model()), {"a": model()}, nnx.State({"a": param()}), [param()]]
)
def test_containers_are_split(node):
    graphdef, state = nnx.split(node)
    assert type(nnx.merge(graphdef, state)) is type(node)


# ------------------------------------------------------------------------------ filters


def test_each_leaf_goes_to_the_first_filter_that_matches():
    m = model()
    _, stats, variables, rest = nnx.split(m, nnx.BatchStat, nnx.Variable, ...)
    assert (list(stats), list(variables), list(rest)) == (["bias"], ["kernel"], [])
    assert isinstance(rest, nnx.State)


def test_split_refuses_leftovers_and_state_drops_them():
    m = model()
    told = "Non-exhaustive filters, got a non-empty remainder", "bias", "`...`"
    for take_apart in (nnx.split, nnx.unpack):
        with raises(ValueError, *told):
            take_apart(m, nnx.Param)
    assert list(nnx.state(m, nnx.Param)) == ["kernel"]


def test_state_gives_a_tuple_for_several_filters():
    m = model()
    params, stats = nnx.state(m, nnx.Param, nnx.BatchStat)
    assert (list(params), list(stats)) == (["kernel"], ["bias"])
    assert isinstance(nnx.state(m, nnx.Param), nnx.State)


def test_ellipsis_must_be_the_last_filter():
    phrase = "`...` or `True` can only be used as the last filters"
    with pytest.raises(ValueError, match=phrase):
        nnx.split(model(), ..., nnx.Param)


# ------------------------------------------------------------------------ single leaves


@pytest.mark.parametrize("leaf", [param(), jnp.ones(2), np.ones(2), 42, "text", object])
def test_the_state_of_a_single_leaf_is_the_leaf(leaf, graph):
    graphdef, state = nnx.split(leaf, graph=graph)
    assert state is leaf
    assert nnx.merge(graphdef, state) is leaf
    assert nnx.state(leaf, graph=graph) is leaf


def test_the_other_groups_of_a_single_leaf_are_empty_states():
    v = param()
    _, stats, params, rest = nnx.split(v, nnx.BatchStat, nnx.Param, ...)
    assert params is v
    assert stats == rest == nnx.State({}) and isinstance(stats, nnx.State)
    with pytest.raises(ValueError, match="Non-exhaustive filters"):
        nnx.split(v, nnx.BatchStat)
    with pytest.raises(ValueError, match="Expected a State object"):
        nnx.unpack(v)


def test_none_has_no_leaves(graph):
    graphdef, state = nnx.split(None, graph=graph)
    assert state == nnx.State({}) and nnx.merge(graphdef, state) is None


# ------------------------------------------------------------------------------ sharing


def test_shared_variables_appear_once_at_their_first_path_and_arrays_at_each():
    p, x, shared = param(), jnp.ones(2), Block(w=param())
    assert list(nnx.state(Block(b=p, a=p))) == ["a"]
    assert list(nnx.state(Block(linear1=shared, linear2=shared))) == ["linear1"]
    assert list(nnx.state(Block(a=x, b=x))) == ["a", "b"]


def test_merge_restores_cycles():
    m = Block(a=param())
    m.me = m
    merged = nnx.merge(*nnx.split(m))
    assert merged.me is merged and merged is not m


# --------------------------------------------------------------------- non-array leaves


def test_plain_values_in_containers_are_static_in_graph_mode_only():
    array, spec = jnp.ones(1), jax.ShapeDtypeStruct((), jnp.float32)
    assert nnx.state([1, "a", array, spec], graph=True) == nnx.State({2: array})
    state = nnx.state([1, "a", array], graph=False)
    assert state == nnx.State({0: 1, 1: "a", 2: array})


def test_data_attributes_are_leaves_whatever_they_hold(graph):
    spec = jax.ShapeDtypeStruct((2,), jnp.float32)
    m = Block(a=nnx.data(3), b=nnx.data(spec), c=nnx.data(None), d=4)
    assert nnx.state(m, graph=graph) == nnx.State({"a": 3, "b": spec})


# ------------------------------------------------------------------------------ flatten


def test_flatten_gives_paths_or_raw_values():
    m = model()
    _, flat = nnx.flatten(m)
    assert isinstance(flat, nnx.FlatState)
    assert flat.paths == (("bias",), ("kernel",))
    _, leaves = nnx.flatten(m, with_paths=False, graph=True)
    assert leaves[0] is m.bias.get_raw_value() and leaves[1] is m.kernel.get_raw_value()
    assert len(leaves) == 2
    _, leaves = nnx.flatten(m, with_paths=False, graph=False)
    assert leaves[0] is m.bias and leaves[1] is m.kernel


def test_ref_index_numbers_objects_in_visiting_order():
    ref_backed = nnx.Variable(jnp.ones(2), ref=True)
    m = Block(a=param(), b=ref_backed)
    index = nnx.graphlib.RefMap()
    nnx.flatten(m, ref_index=index)
    expected = [m, m.a, m.b, ref_backed.get_raw_value()]
    assert [index[x] for x in expected] == [0, 1, 2, 3]
    graphdef, flat = nnx.flatten(m, ref_index=index)
    assert graphdef.nodes == [nnx.graphlib.NodeRef(0)] and len(flat) == 0


def test_outer_index_is_recorded():
    m = Block(a=param())
    outer = nnx.graphlib.RefMap([(m, 7), (m.a, 9)])
    graphdef, _ = nnx.flatten(m, ref_outer_index=outer)
    assert [node.outer_index for node in graphdef.nodes] == [7, 9]


# -------------------------------------------------------------------------------- merge


def test_merge_runs_no_init_and_shares_variables(graph):
    m = model()
    merged = nnx.merge(*nnx.split(m, graph=graph))
    assert merged is not m and merged.kernel is m.kernel and merged.size == 3
    merged.new = 5
    assert not hasattr(m, "new")


def test_merge_with_copy_makes_new_variables_of_the_same_buffers(graph):
    m = model()
    merged = nnx.merge(*nnx.split(m, graph=graph), copy=True)
    assert merged.kernel is not m.kernel
    assert merged.kernel[...] is m.kernel[...]


def test_raw_leaves_become_variables_as_recorded_and_variables_stay(graph):
    m = Block(a=nnx.Param(jnp.ones(2), tag="x"))
    graphdef = nnx.graphdef(m, graph=graph)
    merged = nnx.merge(graphdef, {"a": jnp.zeros(3)})
    assert type(merged.a) is nnx.Param and merged.a.tag == "x"
    raw = nnx.merge(graphdef, {"a": jnp.zeros(3)}, recreate_variables=False)
    assert isinstance(raw.a, jax.Array)
    given = nnx.BatchStat(jnp.ones(2), tag="y")
    assert nnx.merge(graphdef, {"a": given}).a is given


def test_an_array_in_the_place_of_a_ref_stays_an_array():
    m = Block(a=jax.new_ref(jnp.ones(2)), b=nnx.Param(jnp.ones(2), ref=True))
    merged = nnx.merge(nnx.graphdef(m), {"a": jnp.zeros(2), "b": jnp.zeros(2)})
    assert isinstance(merged.a, jax.Array) and not isinstance(merged.a, jax.Ref)
    assert not merged.b.ref


def test_states_of_any_form_number_and_order():
    m = model()
    graphdef, params, rest = nnx.split(m, nnx.Param, ...)
    empty = nnx.State({})
    assert nnx.merge(graphdef, rest, empty, params).kernel is m.kernel
    flat, pure = nnx.to_flat_state(rest), nnx.to_pure_dict(params)
    merged = nnx.merge(graphdef, flat, pure)
    assert merged.bias is m.bias and type(merged.kernel) is nnx.Param
    graphdef, leaves_in_order = nnx.flatten(m, with_paths=False)
    assert type(nnx.merge(graphdef, leaves_in_order).bias) is nnx.BatchStat


def test_statuses_setup_flags_and_static_values_survive():
    config = {"depth": [1, 2]}
    m = Block(a=nnx.data(3), b=nnx.static(4), config=config)
    m._pytree__state.is_setup = True
    merged = nnx.merge(*nnx.split(m))
    assert dict(merged._pytree__nodes) == {"a": True, "b": False, "config": False}
    assert merged._pytree__state.is_setup and merged.config is config


def test_dict_valued_variables_merge_from_a_pure_dict():
    m = Block(a=nnx.Variable({"x": jnp.ones(1), "y": {"z": jnp.ones(1)}}))
    graphdef, state = nnx.split(m)
    merged = nnx.merge(graphdef, nnx.to_pure_dict(state))
    assert sorted(merged.a.get_value()) == ["x", "y"]


# ------------------------------------------------------------------------- wrong merges


def test_string_indices_are_matched_as_integers():
    graphdef, state = nnx.split(nnx.List([param(float(i)) for i in range(12)]))
    pure = {str(i): x for i, x in nnx.to_pure_dict(state).items()}
    merged = nnx.merge(graphdef, pure)
    assert [v[...][0].item() for v in merged] == list(range(12))


def test_integers_are_matched_with_keys_that_are_digits():
    graphdef, state = nnx.split(nnx.Dict({"0": param(0.0), "1": param(1.0)}))
    merged = nnx.merge(graphdef, nnx.restore_int_paths(nnx.to_pure_dict(state)))
    assert [merged[k][...][0].item() for k in ("0", "1")] == [0.0, 1.0]


def test_renamed_keys_are_named():
    graphdef, _ = nnx.split(Block(a=param(), b=param()))
    with raises(ValueError, "missing: b", "unexpected: c"):
        nnx.merge(graphdef, {"a": jnp.ones(2), "c": jnp.ones(2)})
    with pytest.raises(ValueError, match="missing: a"):
        nnx.merge(nnx.graphdef(Block(a=jnp.ones(2))), {"a": {"b": jnp.ones(2)}})


TOO_FEW, TOO_MANY = [{"a": 1.0}], [{"a": 1.0, "b": 2.0, "c": 3.0}]
TWICE = [{"a": 1.0, "b": 2.0}, {"b": 2.0}]


@pytest.mark.parametrize("states", [TOO_FEW, TOO_MANY, TWICE, [[1.0]]])
def test_wrong_numbers_of_leaves_are_refused(states, graph):
    graphdef, _ = nnx.split(Block(a=param(), b=param()), graph=graph)
    with pytest.raises(ValueError, match="Incorrect number of leaves.*2"):
        nnx.merge(graphdef, *states)


def test_empty_sub_mappings_don_t_hide_leaves():
    m = Block(a=param())
    graphdef, state = nnx.split(m)
    assert nnx.merge(graphdef, nnx.State({"a": {}}), state).a is m.a


GRAPHDEF, STATE = nnx.split(model())
PACKED, OTHER = nnx.unpack(model()), nnx.unpack(Block(a=param()))
NO_STATE = r"merge\(\) missing 1 required positional argument: 'state'"
MISUSE = [
    ((GRAPHDEF,), TypeError, NO_STATE),
    ((STATE, STATE), TypeError, "Expected a GraphDef or GraphState object"),
    ((GRAPHDEF, [1, 2], STATE), ValueError, "Only one state can be passed as a list"),
    ((PACKED, nnx.State({})), ValueError, "Expected GraphState object.*State"),
    ((PACKED, OTHER), ValueError, "GraphDef must be the same"),
]


@pytest.mark.parametrize(("args", "error", "phrase"), MISUSE)
def test_misuse_of_merge(args, error, phrase):
    with pytest.raises(error, match=phrase):
        nnx.merge(*args)


def test_unflatten_needs_a_state():
    with pytest.raises(ValueError, match="Unsupported state type"):
        nnx.unflatten(GRAPHDEF, 3)


# ---------------------------------------------------------------------------- unflatten


def test_index_ref_shares_objects_between_graphdefs():
    shared = Block(w=param())
    index = nnx.graphlib.RefMap()
    first = nnx.flatten([shared], ref_index=index)
    second = nnx.flatten({"again": shared}, ref_index=index)
    found = nnx.graphlib.IndexMap()
    a = nnx.unflatten(*first, index_ref=found)
    b = nnx.unflatten(*second, index_ref=found)
    assert a[0] is b["again"] is found[0]


def test_unflatten_refills_existing_objects():
    m = Block(a=param(0.0), old=3)
    variable = m.a
    outer = nnx.graphlib.RefMap([(m, 0), (m.a, 1)])
    changed = Block(a=param(5.0), new=4)
    known = nnx.graphlib.RefMap([(changed, 0), (changed.a, 1)])
    graphdef, flat = nnx.flatten(changed, ref_outer_index=known)
    existing = nnx.graphlib.IndexMap.from_refmap(outer)
    result = nnx.unflatten(graphdef, flat, outer_index_outer_ref=existing)
    assert result is m and m.a is variable
    assert m.a[...].tolist() == [5.0, 5.0]
    assert m.new == 4 and not hasattr(m, "old")


def test_reused_objects_must_have_the_recorded_type():
    m = Block(a=param())
    graphdef, flat = nnx.flatten(m, ref_outer_index=nnx.graphlib.RefMap([(m, 0)]))
    existing = nnx.graphlib.IndexMap({0: Hidden()})
    with pytest.raises(ValueError, match="Block.*Hidden"):
        nnx.unflatten(graphdef, flat, outer_index_outer_ref=existing)


def test_ref_maps_compare_by_identity():
    a, b = [1], [1]
    numbers = nnx.graphlib.RefMap([(a, 0)])
    numbers.update(nnx.graphlib.RefMap([(b, 1)]))
    assert numbers.get(a) == 0 and numbers[b] == 1 and [1] not in numbers
    assert len(numbers) == 2
    assert nnx.graphlib.IndexMap.from_refmap(numbers)[1] is b
    index_map = nnx.graphlib.IndexMap({3: a})
    assert nnx.graphlib.RefMap.from_indexmap(index_map)[a] == 3


# -------------------------------------------------------------------- inside transforms


def test_split_and_merge_under_jit(graph):
    graphdef, state = nnx.split(model(), graph=graph)

    @jax.jit
    def double(graphdef, state):
        m = nnx.merge(graphdef, state)
        m.kernel[...] *= 2
        m.added = jnp.zeros(1)
        return nnx.split(m, graph=graph)

    merged = nnx.merge(*double(graphdef, state))
    assert merged.kernel[...].tolist() == [2.0, 2.0]
    assert merged.added.tolist() == [0.0]
    assert state["kernel"][...].tolist() == [1.0, 1.0]


# ---------------------------------------------------------------------------- GraphDefs


def test_it_is_a_pytree_without_leaves_frozen_slotted_and_generic(graph):
    graphdef = nnx.graphdef(Block(a=param()), graph=graph)
    assert jax.tree.leaves(graphdef) == []
    assert jax.jit(lambda g: g)(graphdef) == graphdef
    with pytest.raises(dataclasses.FrozenInstanceError):
        graphdef.nodes = []
    assert not hasattr(graphdef, "__dict__")
    nnx.GraphDef[Block], nnx.PureState[Block]


def test_values_and_shapes_do_not_matter(graph):
    alike = Block(b=jnp.zeros((1, 2)), a=nnx.Param(jnp.ones(())))
    one = nnx.graphdef(Block(a=param(), b=jnp.ones(3)), graph=graph)
    other = nnx.graphdef(alike, graph=graph)
    assert one == other and hash(one) == hash(other)


def tied():
    p = param()
    return Block(a=p, b=p)


@tables.cases(
    "one, other",
    (Block(a=param()), Node()),
    (Block(a=param()), Block(b=param())),
    (Block(a=1), Block(a=2)),
    (Block(a=param()), Block(a=nnx.BatchStat(jnp.ones(2)))),
    (Block(a=param()), Block(a=nnx.Param(jnp.ones(2), tag="x"))),
    (tied(), Block(a=param(), b=param())),
    (Block(a=nnx.data(1)), Block(a=1)),
    (Block(a=param()), Block(a=Scale(jnp.ones(2)))),
)
def test_structure_matters(one, other):
    assert nnx.graphdef(one) != nnx.graphdef(other)


def test_the_modes_differ_and_merge_takes_either():
    m = Block(a=param())
    by_mode = [nnx.graphdef(m, graph=graph) for graph in (True, False)]
    assert by_mode[0] != by_mode[1]
    for graphdef in by_mode:
        assert nnx.merge(graphdef, nnx.state(m)).a is m.a


def test_unhashable_static_values_and_metadata(graph):
    graphdef = nnx.graphdef(Block(a=[1, 2], b=param()))
    metadata = nnx.graphdef(nnx.Param(jnp.ones(1), notes=[1]), graph=graph)
    for unhashable in (graphdef, metadata):
        with pytest.raises(TypeError, match="unhashable"):
            hash(unhashable)
    assert graphdef == nnx.graphdef(Block(a=[1, 2], b=param()))
    assert jax.jit(lambda g: jnp.ones(g.num_leaves))(graphdef).shape == (1,)
    with pytest.raises(ValueError, match="[Nn]on-hashable"):
        jax.jit(lambda g: 0, static_argnums=0)(graphdef)


def test_jit_traces_once_per_structure(graph):
    count = 0

    @jax.jit
    def f(graphdef, state):
        nonlocal count
        count += 1
        return nnx.merge(graphdef, state).a * 2

    m = Block(a=param())
    for _ in range(3):
        f(*nnx.split(m, graph=graph))
        f(*nnx.split(Block(a=param(3.0)), graph=graph))
    assert count == 1
    m.b = 1
    f(*nnx.split(m, graph=graph))
    f(*nnx.split(m, graph=graph))
    assert count == 2


def test_it_can_be_a_static_argument():
    graphdef, state = nnx.split(Block(a=param()))
    f = jax.jit(lambda g, s: nnx.merge(g, s).a[...], static_argnums=0)
    assert f(graphdef, state).tolist() == [1.0, 1.0]


def test_copies_compare_equal(graph):
    graphdef = nnx.graphdef(Block(a=param(), b=[1], c=nnx.List([param()])), graph=graph)
    assert copy.deepcopy(graphdef) == graphdef
    assert pickle.loads(pickle.dumps(graphdef)) == graphdef


def test_pickles_keep_functions_in_attributes(graph):
    # `nnx.relu` is a function that `jax.jit` wraps, `abs` one of C.
    node = nnx.Sequential(nnx.relu, abs, math.fmod, nnx.Linear(1, 1, rngs=nnx.Rngs(0)))
    graphdef, structure = nnx.graphdef(node, graph=graph), jax.tree.structure(node)
    for x in (graphdef, structure):
        for copied in (pickle.loads(pickle.dumps(x)), copy.deepcopy(x)):
            assert copied == x
            assert hash(copied) == hash(x)


# ----------------------------------------------------------------- what clients look at


def test_the_first_node_tells_the_kind_of_root():
    graphlib, m = nnx.graphlib, Block(a=param())
    expected = {(m, True): graphlib.NodeDef, (m, False): graphlib.TreeNodeDef}
    for (node, graph), kind in expected.items():
        assert isinstance(nnx.graphdef(node, graph=graph).nodes[0], kind)
    assert isinstance(nnx.graphdef(m.a).nodes[0], graphlib.VariableDef)
    for leaf in (42, jnp.ones(2)):
        assert nnx.graphdef(leaf, graph=True).nodes == []


def test_a_root_seen_before_is_a_reference():
    m = Block(a=param())
    index = nnx.graphlib.RefMap()
    nnx.flatten(m, ref_index=index)
    graphdef, flat = nnx.flatten(m, ref_index=index)
    assert isinstance(graphdef.nodes[0], nnx.graphlib.NodeRef)
    assert graphdef.num_leaves == len(flat) == 0


def test_fields_of_the_definitions():
    p = nnx.Param(jnp.ones(2), tag="x", ref=True)
    graphdef = nnx.graphdef(Block(a=p, b=p, n=3))
    node, variable, again = graphdef.nodes
    assert (node.type, node.index, node.outer_index) == (Block, 0, None)
    assert node.num_attributes == 3
    assert (variable.type, variable.index) == (nnx.Param, 1)
    assert variable.metadata["tag"] == "x"
    assert variable.array_refdef == nnx.graphlib.ArrayRefDef(2, None)
    assert again == nnx.graphlib.NodeRef(1)
    assert [key for key, _ in graphdef.attributes] == ["a", "b", "n"]
    assert graphdef.num_leaves == 1


def test_the_path_index_of_trees():
    (node, *_) = nnx.graphdef({"b": param(), "a": [1, param()]}, graph=False).nodes
    assert node.type is dict
    assert node.path_index == ((("a", 0), 0), (("a", 1), 1), (("b",), 2))


def test_repr_names_types_and_indices():
    graphdef = nnx.graphdef(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    assert "NodeDef(type='Linear', index=0" in repr(graphdef.nodes)
    assert "num_leaves=2" in repr(graphdef)


class Counter(nnx.Module):
    def __init__(self, start=0):
        self.count = nnx.Variable(jnp.array(start))

    def increment(self, by=1):
        self.count[...] += by
        return self.count[...]

    def __call__(self, x):
        return x + self.count[...]


# --------------------------------------------------------------------------------- call


def test_call_returns_the_output_and_the_new_pair():
    pair = nnx.split(Counter())
    out, (graphdef, state) = nnx.call(pair).increment(by=2)
    assert out == 2 and state["count"][...] == 2
    out, _ = nnx.call((graphdef, state))(5)
    assert out == 7


def test_attributes_and_items_reach_a_method():
    m = Block(subs=nnx.List([Counter(1), Counter(2)]), named=nnx.Dict(b=Counter(3)))
    pair = nnx.split(m)
    assert nnx.call(pair).subs[1].increment()[0] == 3
    assert nnx.call(pair).named["b"](1)[0] == 4
    assert nnx.call(nnx.split({"b": Counter()}))["b"].increment()[0] == 1


def test_eager_calls_write_the_given_variables_and_jitted_ones_do_not():
    m = Counter()
    pair = nnx.split(m)
    _, new = jax.jit(lambda p: nnx.call(p).increment())(pair)
    assert m.count[...] == 0 and new[1]["count"][...] == 1
    nnx.call(pair).increment()
    assert m.count[...] == 1


def test_call_and_apply_split_in_the_mode_in_force(graph):
    graphdef, state = nnx.split(Counter())
    with nnx.set_graph_mode(graph):
        calls = nnx.call((graphdef, state)), graphdef.apply(state)
        pairs = [call.increment()[1] for call in calls]
    for new, _ in pairs:
        assert isinstance(new.nodes[0], nnx.graphlib.TreeNodeDef) is not graph


def test_call_and_apply_take_several_states_and_apply_a_mode():
    graphdef, counts, rest = nnx.split(Counter(), nnx.Variable, ...)
    _, pair = nnx.call((graphdef, nnx.clone(counts), rest)).increment()
    assert len(pair) == 2
    out, (new, state) = graphdef.apply(counts, rest, graph=False).increment(3)
    assert out == 3 and state["count"][...] == 3
    assert isinstance(new.nodes[0], nnx.graphlib.TreeNodeDef)


# --------------------------------------------------------------------------- GraphState


def nested(value=1.0):
    return Block(kernel=param(value), linear=Block(kernel=param(value)))


@pytest.fixture
def gs():
    return nnx.unpack(nested())


def test_it_is_a_mapping_over_the_state():
    m = nested()
    gs = nnx.unpack(m)
    assert gs["kernel"] is gs.kernel is m.kernel
    assert "kernel" in gs and list(gs) == ["kernel", "linear"] and len(gs) == 2
    gs.linear.kernel = 0
    gs["kernel"] = 1
    assert gs.raw_mapping == {"kernel": 1, "linear": {"kernel": 0}}
    del gs["kernel"]
    assert list(gs) == ["linear"]
    assert m.kernel[...].tolist() == [1.0, 1.0]


def test_missing_attributes(gs):
    with pytest.raises(AttributeError, match="No attribute 'nope' in State"):
        gs.nope
    assert not hasattr(gs, "__wrapped__")


def test_it_needs_a_state():
    with pytest.raises(ValueError, match="Expected a State object, got dict"):
        nnx.GraphState(nnx.graphdef(Block()), {})


def test_its_pytree_has_the_paths_of_the_state(gs):
    leaves = jax.tree_util.tree_leaves_with_path(gs)
    printed = [jax.tree_util.keystr(path) for path, _ in leaves]
    assert printed == ["['kernel'].value", "['linear']['kernel'].value"]
    of_state = jax.tree_util.tree_leaves_with_path(nnx.state(nnx.merge(gs)))
    assert [path for path, _ in leaves] == [path for path, _ in of_state]


def test_jax_functions_return_graph_states(gs):
    doubled = jax.tree.map(lambda x: 2 * x, gs)
    assert isinstance(doubled, nnx.GraphState)
    grads = jax.grad(lambda g: jnp.sum(nnx.merge(g).kernel[...] ** 2))(gs)
    assert isinstance(grads, nnx.GraphState)
    assert grads.kernel[...].tolist() == [2.0, 2.0]
    assert nnx.merge(doubled).kernel[...].tolist() == [2.0, 2.0]


def test_equality_compares_both_parts():
    m = Block(a=nnx.data(1))
    assert nnx.unpack(m) == nnx.unpack(m)
    for other in (Block(a=nnx.data(1), n=2), Block(a=nnx.data(2))):
        assert nnx.unpack(m) != nnx.unpack(other)


def test_state_functions_take_it(gs):
    assert len(nnx.to_flat_state(gs)) == 2
    assert isinstance(nnx.split_state(gs, nnx.Param), nnx.State)
    assert isinstance(nnx.map_state(lambda p, v: v, gs), nnx.State)
    m = nested(5.0)
    nnx.update(m, gs)
    assert m.kernel[...].tolist() == [1.0, 1.0]


def test_several_filters_give_several_that_merge_and_have_a_union():
    m = Block(a=param(), b=nnx.BatchStat(jnp.ones(1)))
    params, rest = nnx.unpack(m, nnx.Param, ...)
    assert nnx.merge(rest, params).a is m.a
    union = params | rest
    assert isinstance(union, nnx.GraphState) and sorted(union) == ["a", "b"]
