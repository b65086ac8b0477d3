"""GraphDef, GraphState, call and apply (contract sections 4 and 9)."""

import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from tests.strategies import Block, Node, Scale, param


def test_it_is_a_pytree_without_leaves_frozen_slotted_and_generic(graph):
    graphdef = nnx.graphdef(Block(a=param()), graph=graph)
    assert jax.tree.leaves(graphdef) == []
    assert jax.jit(lambda g: g)(graphdef) == graphdef
    with pytest.raises(dataclasses.FrozenInstanceError):
        graphdef.nodes = []
    assert not hasattr(graphdef, "__dict__")
    nnx.GraphDef[Block], nnx.PureState[Block]


def test_values_and_shapes_do_not_matter(graph):
    one = nnx.graphdef(Block(a=param(), b=jnp.ones(3)), graph=graph)
    other = nnx.graphdef(
        Block(b=jnp.zeros((1, 2)), a=nnx.Param(jnp.ones(()))), graph=graph
    )
    assert one == other and hash(one) == hash(other)


def tied():
    p = param()
    return Block(a=p, b=p)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Block(a=param()), Node()),
        (Block(a=param()), Block(b=param())),
        (Block(a=1), Block(a=2)),
        (Block(a=param()), Block(a=nnx.BatchStat(jnp.ones(2)))),
        (Block(a=param()), Block(a=nnx.Param(jnp.ones(2), tag="x"))),
        (tied(), Block(a=param(), b=param())),
        (Block(a=nnx.data(1)), Block(a=1)),
        (Block(a=param()), Block(a=Scale(jnp.ones(2)))),
    ],
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
