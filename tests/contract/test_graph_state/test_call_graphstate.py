"""Call, GraphDef.apply, GraphState (contract section 9)."""

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from tests.strategies import Block, param


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


def test_call_takes_several_states_and_returns_one():
    graphdef, counts, rest = nnx.split(Counter(), nnx.Variable, ...)
    _, pair = nnx.call((graphdef, counts, rest)).increment()
    assert len(pair) == 2


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
        pairs = [
            nnx.call((graphdef, state)).increment()[1],
            graphdef.apply(state).increment()[1],
        ]
    for new, _ in pairs:
        assert isinstance(new.nodes[0], nnx.graphlib.TreeNodeDef) is not graph


def test_apply_takes_states_and_a_mode():
    graphdef, counts, rest = nnx.split(Counter(), nnx.Variable, ...)
    out, (new, state) = graphdef.apply(counts, rest, graph=False).increment(3)
    assert out == 3 and state["count"][...] == 3
    assert isinstance(new.nodes[0], nnx.graphlib.TreeNodeDef)


# --------------------------------------------------------------------------- GraphState


def packed():
    return nnx.unpack(Block(kernel=param(), linear=Block(kernel=param())))


def test_it_is_a_mapping_over_the_state():
    m = Block(kernel=param(), linear=Block(kernel=param()))
    gs = nnx.unpack(m)
    assert gs["kernel"] is gs.kernel is m.kernel
    assert "kernel" in gs and list(gs) == ["kernel", "linear"] and len(gs) == 2
    gs.linear.kernel = 0
    gs["kernel"] = 1
    assert gs.raw_mapping == {"kernel": 1, "linear": {"kernel": 0}}
    del gs["kernel"]
    assert list(gs) == ["linear"]
    assert m.kernel[...].tolist() == [1.0, 1.0]


def test_missing_attributes():
    with pytest.raises(AttributeError, match="No attribute 'nope' in State"):
        packed().nope
    assert not hasattr(packed(), "__wrapped__")


def test_it_needs_a_state():
    graphdef = nnx.graphdef(Block())
    with pytest.raises(ValueError, match="Expected a State object, got dict"):
        nnx.GraphState(graphdef, {})


def test_its_pytree_has_the_paths_of_the_state():
    gs = packed()
    leaves = jax.tree_util.tree_leaves_with_path(gs)
    printed = [jax.tree_util.keystr(path) for path, _ in leaves]
    assert printed == ["['kernel'].value", "['linear']['kernel'].value"]
    state = nnx.state(nnx.merge(gs))
    assert [p for p, _ in leaves] == [
        p for p, _ in jax.tree_util.tree_leaves_with_path(state)
    ]


def test_jax_functions_return_graph_states():
    gs = packed()
    doubled = jax.tree.map(lambda x: 2 * x, gs)
    assert isinstance(doubled, nnx.GraphState)
    grads = jax.grad(lambda g: jnp.sum(nnx.merge(g).kernel[...] ** 2))(gs)
    assert isinstance(grads, nnx.GraphState)
    assert grads.kernel[...].tolist() == [2.0, 2.0]
    assert nnx.merge(doubled).kernel[...].tolist() == [2.0, 2.0]


def test_equality_compares_both_parts():
    m, other = Block(a=nnx.data(1)), Block(a=nnx.data(1), n=2)
    assert nnx.unpack(m) == nnx.unpack(m)
    assert nnx.unpack(m) != nnx.unpack(other)
    assert nnx.unpack(m) != nnx.unpack(Block(a=nnx.data(2)))


def test_state_functions_take_it():
    gs = packed()
    assert len(nnx.to_flat_state(gs)) == 2
    assert isinstance(nnx.split_state(gs, nnx.Param), nnx.State)
    assert isinstance(nnx.map_state(lambda p, v: v, gs), nnx.State)
    m = Block(kernel=param(5.0), linear=Block(kernel=param(5.0)))
    nnx.update(m, gs)
    assert m.kernel[...].tolist() == [1.0, 1.0]


def test_several_filters_give_several_that_merge():
    m = Block(a=param(), b=nnx.BatchStat(jnp.ones(1)))
    params, rest = nnx.unpack(m, nnx.Param, ...)
    assert nnx.merge(rest, params).a is m.a


def test_union():
    params, rest = nnx.unpack(Block(a=param(), b=nnx.BatchStat(1)), nnx.Param, ...)
    union = params | rest
    assert isinstance(union, nnx.GraphState) and sorted(union) == ["a", "b"]
