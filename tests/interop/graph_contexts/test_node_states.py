"""NodeStates and contexts: JAX transforms lifted by hand (contract, section 11).

Tests that take ``lib`` hold for the peer as well, and run on it, too.
"""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import threads

check_equal = np.testing.assert_array_equal


@pytest.fixture(params=["graftree", pytest.param("flax.nnx", marks=pytest.mark.peers)])
def lib(request):
    pytest.importorskip(request.param)
    return importlib.import_module(request.param)


def make(lib):
    count = lib.BatchStat(jnp.zeros(3))
    return lib.Dict(w=lib.Param(jnp.arange(3.0)), inner=lib.Dict(count=count))


def holds_tracers(lib, m):
    leaves = jax.tree.leaves(lib.state(m))
    return any(isinstance(x, jax.core.Tracer) for x in leaves)


# ----------------------------------------------------------------------- NodeStates


def test_node_states_hold_what_split_returns(lib):
    from_split = lib.NodeStates.from_split
    graphdef, params, rest = lib.split(make(lib), lib.Param, ...)
    node = from_split(graphdef, params, rest, metadata="m")
    assert node.graphdef == graphdef and node.metadata == "m"
    assert node.states == (params, rest)
    assert from_split(graphdef, params).state is params
    assert lib.from_tree(node).inner.count.shape == (3,)


def test_states_and_prefixes_have_no_graphdef(lib):
    node = lib.NodeStates.from_states(1, 2)
    axes = lib.NodeStates.from_prefixes((i for i in (1, 2)), metadata="m")
    assert node.metadata is None and node.states == axes.states == (1, 2)
    assert axes == lib.NodeStates(None, (1, 2), "m")
    for use in (lambda: node.graphdef, lambda: lib.from_tree(axes)):
        with pytest.raises(ValueError, match="No graphdef available"):
            use()
    for none_or_two in (lib.NodeStates(None, (), None), node):
        count = len(none_or_two.states)
        with pytest.raises(ValueError, match=f"Expected exactly one.*got {count}"):
            none_or_two.state


def test_node_states_are_frozen_and_replace_copies(lib):
    node = lib.NodeStates.from_states(1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        node.states = ()
    assert node.replace(metadata="m") == lib.NodeStates(None, (1,), "m")
    assert node.metadata is None


def test_node_states_are_pytrees_with_static_metadata(lib):
    node = lib.NodeStates.from_split(*lib.split(make(lib)), metadata="m")
    flat, treedef = jax.tree_util.tree_flatten_with_path(node)
    paths = [jax.tree_util.keystr(path) for path, _ in flat]
    assert paths == [".states[0]['inner']['count'].value", ".states[0]['w'].value"]
    assert treedef != jax.tree.structure(node.replace(metadata="other"))
    assert jax.jit(lambda x: x)(node).graphdef == node.graphdef


def test_graphdef_and_state_are_arguments_of_jax(lib):
    traces = []

    @jax.jit
    def apply(graphdef, state, x):
        traces.append(None)
        model = lib.merge(graphdef, state)
        model.w[...] += x
        return lib.split(model)

    graphdef, state = apply(*apply(*lib.split(make(lib)), 1.0), 2.0)
    check_equal(lib.merge(graphdef, state).w, [3, 4, 5])
    assert len(traces) == 1 and jax.tree.leaves(graphdef) == []


# ---------------------------------------------------------------- to_tree, from_tree


def test_objects_become_node_states_with_one_numbering(lib, graph):
    m = make(lib)
    with lib.set_graph_mode(graph):
        first, again, inner, plain = lib.to_tree((m, {"a": m}, m.inner, [1, None]))
    assert plain == [1, None] and first.state["w"] is m.w
    for node in (again["a"], inner):
        assert isinstance(node.graphdef.nodes[0], lib.graphlib.NodeRef)
        assert isinstance(node.state, lib.State) and len(node.state) == 0


def test_the_state_of_a_variable_or_ref_is_itself(lib):
    v, ref = lib.Param(jnp.array(1)), jax.new_ref(1.0)
    node, ref_node = lib.to_tree((v, ref))
    assert node.state is v and ref_node.state is ref
    copy, same_ref = lib.from_tree((node, ref_node))
    assert copy is not v and copy[...] == 1 and same_ref is ref


def test_from_tree_is_the_inverse(lib):
    class NoPytree(lib.Module, pytree=False):
        def __init__(self):
            self.me = lib.data(self)

    m, cyclic = make(lib), NoPytree()
    tree = {"m": m, "w": [m.w, m], "x": 2, "s": "text", "c": cyclic}
    out = lib.from_tree(lib.to_tree(tree))
    assert out["m"] is out["w"][1] and out["w"][0] is out["m"].w
    assert out["m"] is not m and out["m"].w is not m.w
    assert (out["x"], out["s"]) == (2, "text")
    assert out["c"].me is out["c"] is not cyclic
    check_equal(out["m"].w, [0, 1, 2])


def noting(lib, calls):
    """A `split_fn` and `merge_fn` that notes what it is called with."""

    def function(ctx, path, prefix, leaf):
        calls.append((jax.tree_util.keystr(path), prefix, type(leaf)))
        if isinstance(leaf, lib.NodeStates):
            return ctx.merge(leaf.graphdef, *leaf.states)
        if isinstance(leaf, (lib.Module, lib.Variable)):
            return lib.NodeStates.from_split(*ctx.split(leaf))
        return leaf

    return function


def test_functions_are_called_per_object_without_path_or_prefix(lib):
    m, calls = make(lib), []
    tree = lib.to_tree((m, 1, {"b": m.w}), split_fn=noting(lib, calls))
    a, one, b = lib.from_tree(tree, merge_fn=noting(lib, calls))
    assert b["b"] is a.w and one == 1
    missing = calls[0][1]
    kinds = lib.Dict, lib.Param, lib.NodeStates, lib.NodeStates
    assert calls == [("", missing, kind) for kind in kinds]


def test_functions_get_the_path_and_the_prefix(lib):
    m, calls = make(lib), []
    tree = (m, 1, {"b": m.w})
    tree = lib.to_tree(tree, prefix=(0, None, 0), split_fn=noting(lib, calls))
    assert calls == [("[0]", 0, lib.Dict), ("[2]['b']", 0, lib.Param)]
    lib.from_tree(tree, prefix=(1, None, {"b": 2}), merge_fn=noting(lib, calls))
    assert calls[2:] == [("[0]", 1, lib.NodeStates), ("[2]['b']", 2, lib.NodeStates)]


def test_functions_are_called_for_other_leaves_on_demand(lib):
    calls, options = [], {"prefix": 0, "map_non_graph_nodes": True}
    tree = lib.to_tree((make(lib), [1, None]), split_fn=noting(lib, calls), **options)
    assert calls == [("[0]", 0, lib.Dict), ("[1][0]", 0, int)]
    lib.from_tree(tree, merge_fn=noting(lib, calls), **options)
    assert calls[2:] == [("[0]", 0, lib.NodeStates), ("[1][0]", 0, int)]


def test_the_default_functions_take_other_leaves_as_far_as_they_can():
    one = nnx.to_tree(1, map_non_graph_nodes=True)
    assert one.state == 1 and nnx.from_tree(one) == 1
    with pytest.raises(ValueError, match=r"expected NodeStates, got int at path \[0\]"):
        nnx.from_tree((1,), prefix=0, map_non_graph_nodes=True)


def test_from_tree_is_told_what_to_merge(lib):
    options = dict.fromkeys(["is_leaf", "is_node_leaf"], lambda x: type(x) is list)
    out = lib.from_tree((1, [2]), merge_fn=lambda *call: call[2:], **options)
    assert out[0] == 1 and out[1][1] == [2]


def test_node_states_can_be_a_prefix_of_node_states(lib):
    calls, axes = [], lib.NodeStates.from_prefixes((0, 1))
    tree = lib.to_tree((make(lib), 1))
    lib.from_tree(tree, prefix=(axes, None), merge_fn=noting(lib, calls))
    assert calls == [("[0]", axes, lib.NodeStates)]


@pytest.mark.parametrize("check_aliasing", [True, False])
def test_a_prefix_must_fit_and_is_a_keyword(lib, check_aliasing):
    with pytest.raises(ValueError, match="different lengths of tuple"):
        lib.to_tree((make(lib), 1), prefix=(0, 1, 2), check_aliasing=check_aliasing)
    with pytest.raises(TypeError, match="positional"):
        lib.to_tree(make(lib), 0)


# ------------------------------------------------------------------ consistent aliases


def test_a_variable_with_two_prefixes_is_an_error(lib):
    m, calls = make(lib), []
    off = {"split_fn": noting(lib, calls), "check_aliasing": False}
    message = r"Inconsistent aliasing detected[^$]*Node: Param\n.*w: 0\n.*: 1"
    with pytest.raises(ValueError, match=message):
        lib.to_tree((m, m.w), prefix=(0, 1))
    lib.to_tree((m, m.w), prefix=(0, 1), **off)
    assert [prefix for _, prefix, _ in calls] == [0, 1]


def test_what_counts_is_the_prefix_of_each_variable(lib):
    m = make(lib)
    axes = lib.StateAxes({lib.Param: 0, ...: 1})
    lib.to_tree((m, m.w, m.inner), prefix=(axes, 0, 1))
    with pytest.raises(ValueError, match="Inconsistent aliasing detected"):
        lib.to_tree((m, m.w), prefix=(axes, 1))
    # Arrays, and modules without Variables, are no references.
    empty, x = lib.Module(), jnp.ones(2)
    lib.to_tree((empty, empty, x, x), prefix=(0, 1, 0, 1))


def test_aliases_are_checked_over_several_calls(lib):
    m, check, seen = make(lib), lib.extract.check_consistent_aliasing, {}
    check(m, 0, node_prefixes=seen)
    check(m.w, 0, node_prefixes=seen)
    with pytest.raises(ValueError, match="Inconsistent aliasing detected"):
        check(m.w, 1, node_prefixes=seen)
    check(m.w, 1)


# ---------------------------------------------------------------- in an update context


def cross(lib, tree, change, transform):
    """The four steps; gives the tree on its way out, and the result."""
    on_its_way = []

    @transform
    def inside(pure):
        inner = lib.from_tree(pure, ctxtag="test", is_inner=True)
        on_its_way.append(lib.to_tree(change(inner), ctxtag="test"))
        return on_its_way[0]

    with lib.update_context("test"):
        pure = inside(lib.to_tree(tree, ctxtag="test"))
        return on_its_way[0], lib.from_tree(pure, ctxtag="test", is_inner=False)


TRANSFORMS = {"plain": lambda f: f, "jit": jax.jit, "remat": jax.checkpoint}


def make_with_refs(lib):
    raw = jax.new_ref(0.0)
    return lib.Dict(w=lib.Param(jnp.zeros(2), ref=True, tag="old"), raw=raw, same=raw)


def change_refs(lib, m):
    m.w[...] += 1
    m.raw[...] += 2
    m.w.set_metadata(tag="new")
    m.v = lib.Param(jnp.ones(3), ref=True)
    m.other = jax.new_ref(jnp.ones(()))
    return m, m.v, m.w


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_refs_are_found_again_or_made_anew(transform):
    def change(m):
        out = change_refs(nnx, m)
        m.x = nnx.Param.from_metadata(m.v.get_raw_value(), m.v.get_metadata())
        return out

    m = make_with_refs(nnx)
    w, ref, raw = m.w, m.w.get_raw_value(), m.raw
    _, (out, v, same) = cross(nnx, m, change, transform)
    assert out is m and m.w is w is same and m.v is v
    assert w.get_raw_value() is ref and m.raw is raw and m.same is raw
    assert m.x.get_raw_value() is v.get_raw_value() and w.tag == "new"
    assert (w[...] == 1).all() and raw[...] == 2
    assert (v[...] == 1).all() and m.other[...] == 1


def test_refs_leave_as_what_stands_for_them(lib):
    change = functools.partial(change_refs, lib)
    (node, again, _), _ = cross(lib, make_with_refs(lib), change, jax.jit)
    state, graphlib = node.state, lib.graphlib
    assert len(again.state) == 0 and isinstance(state["w"], lib.Param)
    assert isinstance(state["w"].get_value(), graphlib.NoUpdate)
    assert isinstance(state["raw"], graphlib.NoUpdate)
    assert isinstance(state["other"], graphlib.ArrayRefOutput)
    assert state["v"].get_value().value.shape == (3,)
    assert jax.tree.leaves(graphlib.NoUpdate()) == []
    assert jax.tree.leaves(graphlib.ArrayRefOutput(3)) == [3]


def test_unknown_tags_are_errors(lib):
    for function in (lib.to_tree, functools.partial(lib.from_tree, is_inner=True)):
        with pytest.raises(ValueError, match="No update context found for tag 'unkn"):
            function(make(lib), ctxtag="unknown")
    with lib.update_context("known"), pytest.raises(ValueError, match="must be spec"):
        lib.from_tree(lib.to_tree(make(lib)), ctxtag="known")
    with pytest.raises(ValueError, match="must be spec"):
        with lib.merge_context("unknown"):
            pass


@dataclasses.dataclass(frozen=True)
class Axes:
    """A prefix of a user, which `split_fn` understands."""

    params: int | None
    stats: int | None


def test_vmap_can_be_written_with_prefixes(lib):
    def split(ctx, path, prefix, leaf):
        parts = ctx.split(leaf, lib.Param, lib.BatchStat)
        return lib.NodeStates.from_split(*parts, metadata=prefix)

    axes = (Axes(0, None), 0)
    jax_axes = (lib.NodeStates.from_prefixes((0, None), metadata=axes[0]), 0)

    @functools.partial(jax.vmap, in_axes=jax_axes, out_axes=jax_axes)
    def inside(*pure):
        m, x = lib.from_tree(pure, ctxtag="vmap", is_inner=True)
        assert m.w.shape == () and m.inner.count.shape == (3,)
        m.w[...] *= x
        m.inner.count[...] += 1
        return lib.to_tree((m, x), prefix=axes, split_fn=split, ctxtag="vmap")

    m = make(lib)
    with lib.update_context("vmap"):
        args = (m, jnp.full(3, 2.0))
        pure = lib.to_tree(args, prefix=axes, split_fn=split, ctxtag="vmap")
        out, _ = lib.from_tree(inside(*pure), ctxtag="vmap", is_inner=False)
    assert out is m
    check_equal(m.w, [0, 2, 4])
    check_equal(m.inner.count, [1, 1, 1])


# ----------------------------------------------------------- split_inputs, merge_inputs


def lift(lib, transform, f):
    general = lib.transforms.general
    return general.split_inputs(transform(general.merge_inputs(f)))


def vmap(axes, out_axis):
    return functools.partial(jax.vmap, in_axes=axes, out_axes=(axes, out_axis))


def test_pairs_trace_once_for_objects_of_one_structure(lib):
    traces = []
    lifted = lift(lib, jax.jit, lambda a, b: traces.append(a is b))
    for m in (make(lib), make(lib)):
        lifted(m, m)
    assert traces == [True]


def test_pairs_lift_vmap(lib):
    def f(m, x):
        assert m.w.shape == () and m.inner.count.shape == ()
        m.inner.count[...] += x.sum()
        return m.w * x, lib.Param(x)

    m, x = make(lib), jnp.arange(6.0).reshape(2, 3)
    out, v = lift(lib, vmap((0, 1), 1), f)(m, x)
    check_equal(out, [[0, 1, 4], [0, 4, 10]])
    check_equal(v, x)
    check_equal(m.inner.count, [3, 5, 7])


@pytest.mark.parametrize("transform", [*TRANSFORMS.values(), vmap((0,), 0)])
def test_writes_to_refs_reach_the_caller(transform):
    m = nnx.Dict(r=nnx.Param(jnp.zeros(3), ref=True))
    add = lift(nnx, transform, lambda m: m.r.set_value(m.r + 1))
    add(m), add(m)
    check_equal(m.r, [2, 2, 2])


@pytest.mark.parametrize("pred", [True, False])
@pytest.mark.parametrize("outer", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_pairs_lift_cond_and_nest(lib, pred, outer):
    general = lib.transforms.general

    def add(m, x):
        m.w[...] += x
        return x

    def run(m, pred, x):
        branches = map(general.merge_inputs, (add, lambda m, x: add(m, -x)))
        return general.split_inputs(jax.lax.cond)(pred, *branches, m, x)

    m = make(lib)
    sign = 1 if pred else -1
    assert lift(lib, outer, run)(m, pred, 2.0) == 2 * sign
    check_equal(m.w, np.arange(3) + 2 * sign)


def test_pairs_may_have_a_tag_of_their_own(lib):
    general = lib.transforms.general

    @general.split_inputs(ctxtag="own")
    @jax.jit
    @general.merge_inputs(ctxtag="own")
    def double(w):
        w[...] *= 2

    m = make(lib)
    lift(lib, jax.jit, lambda m: double(m.w))(m)
    check_equal(m.w, [0, 2, 4])
    half = general.merge_inputs(double, ctxtag="other")
    for unpaired in (general.split_inputs(half), half):
        with pytest.raises(ValueError, match="No update context found for tag 'other'"):
            unpaired(m.w)


def test_pairs_take_positions_and_return_a_pair():
    with pytest.raises(TypeError, match="unexpected keyword argument 'm'"):
        lift(nnx, jax.jit, lambda m: None)(m=make(nnx))
    with pytest.raises(TypeError, match=r"the pair \(arguments, output\), got int"):
        nnx.transforms.general.split_inputs(lambda m: 1)(make(nnx))


def test_pairs_keep_the_name_and_take_any_callable(lib):
    def f(k, m):
        return m.w * k

    inner = lib.transforms.general.merge_inputs(f)
    outer = lib.transforms.general.split_inputs(jax.jit(inner))
    assert inner.__name__ == outer.__name__ == "f" and inner.__wrapped__ is f
    check_equal(lift(lib, jax.jit, functools.partial(f, 2))(make(lib)), [0, 2, 4])


@pytest.mark.parametrize("transform", [*TRANSFORMS.values(), vmap((0,), 0)])
def test_failures_leave_no_context_and_no_tracer(lib, transform):
    def f(m):
        m.w[...] += 1
        m.inner.new = lib.Param(m.w * 2)
        m.w = m.inner
        raise KeyError("stop")

    m = make(lib)
    w = m.w
    with pytest.raises(KeyError):
        lift(lib, transform, f)(m)
    assert m.w is w and not hasattr(m.inner, "new") and not holds_tracers(lib, m)
    check_equal(w, [0, 1, 2])
    with pytest.raises(ValueError, match="No update context"):
        lib.current_update_context("split_merge_inputs")


def test_a_captured_object_is_not_written():
    m = make(nnx)
    scale = lift(nnx, jax.jit, lambda m, x: m.w.set_value(m.w * x))
    with pytest.raises(nnx.errors.TraceContextError, match="Cannot mutate"):
        jax.jit(lambda x: scale(m, x))(2.0)
    check_equal(m.w, [0, 1, 2])


def test_clearing_keeps_objects_only(lib):
    m = make(lib)
    tree = (m, 1, {"w": m.w, "x": jnp.ones(2)})
    assert lib.extract.clear_non_graph_nodes(tree) == (m, None, {"w": m.w, "x": None})


# ------------------------------------------------------- a change by each of the ways


def by_contexts(lib, model, f, transform):
    """The four steps; the second and third inside a transform."""

    @lib.update_context("test")
    def run():
        with lib.split_context("test") as ctx:
            graphdef, state = ctx.split(model)

        @transform
        def inside(state):
            with lib.merge_context("test", inner=True) as ctx:
                inner = ctx.merge(graphdef, state)
            f(inner)
            with lib.split_context("test") as ctx:
                return ctx.split(inner)

        new_graphdef, new_state = inside(state)
        with lib.merge_context("test", inner=False) as ctx:
            return ctx.merge(new_graphdef, new_state)

    return run()


def by_trees(lib, model, f, transform):
    return cross(lib, model, lambda m: (f(m), m)[1], transform)[1]


def by_pairs(lib, model, f, transform):
    return lift(lib, transform, lambda m: (f(m), m)[1])(model)


def made(lib=nnx):
    inner = lib.Dict(w=lib.Param(jnp.array(2.0)))
    return lib.Dict(a=lib.Param(jnp.array(1.0), tag="x"), b=inner, static=1)


def swap(lib, m):
    m.a, m.b.w = m.b.w, m.a


CHANGES = {
    "value": (lambda lib, m: m.a.set_value(m.a + 4), lambda m: m.a[...] == 5.0),
    "new": (
        lambda lib, m: setattr(m, "n", lib.Param(m.a * 3)),
        lambda m: m.n[...] == 3.0,
    ),
    "deleted": (
        lambda lib, m: delattr(m, "static"),
        lambda m: not hasattr(m, "static"),
    ),
    "static": (lambda lib, m: setattr(m, "static", 7), lambda m: m.static == 7),
    "alias": (lambda lib, m: setattr(m, "c", m.a), lambda m: m.c is m.a),
    "self": (lambda lib, m: setattr(m, "me", m), lambda m: m.me is m),
    "module": (
        lambda lib, m: setattr(m, "d", lib.Dict(x=lib.Param(m.a + 1))),
        lambda m: m.d.x[...] == 2.0,
    ),
    "metadata": (lambda lib, m: m.a.set_metadata(tag="y"), lambda m: m.a.tag == "y"),
    "swapped": (swap, lambda m: (m.a[...], m.b.w[...]) == (2.0, 1.0)),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("way", [by_contexts, by_trees, by_pairs])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_the_originals_come_back_changed(lib, way, name, transform):
    change, arrived = CHANGES[name]
    model = made(lib)
    variables = {id(model.a), id(model.b.w)}
    inner = model.b
    out = way(lib, model, functools.partial(change, lib), transform)
    assert out is model and model.b is inner and arrived(model)
    assert {id(model.a), id(model.b.w)} == variables
    assert not holds_tracers(lib, model)


# ----------------------------------------------------------- split and merge contexts


def test_second_split_refers_to_the_first():
    model = made()
    with nnx.split_context() as ctx:
        first, state = ctx.split(model)
        second, rest = ctx.split(model)
        third, inner = ctx.split(model.b)
    assert len(state) == 2 and len(rest) == len(inner) == 0
    assert isinstance(second.nodes[0], nnx.graphlib.NodeRef)
    with nnx.merge_context() as ctx:
        pairs = (first, state), (second, rest), (third, inner)
        a, b, c = [ctx.merge(*pair) for pair in pairs]
    assert a is b and c is a.b and a is not model


def test_filters_give_several_states_which_are_merged_again():
    filters = nnx.PathContains("a"), ...
    with nnx.split_context() as ctx:
        graphdef, params, rest = ctx.split(made(), *filters)
    assert list(params) == ["a"] and list(rest) == ["b"]
    with nnx.merge_context() as ctx:
        assert ctx.merge(graphdef, params, rest).b.w[...] == 2.0
    with nnx.split_context() as ctx:
        graphdef, *flat = ctx.flatten(made(), *filters)
    with nnx.merge_context() as ctx:
        assert ctx.unflatten(graphdef, *flat).b.w[...] == 2.0


def test_merge_copies_variables_and_unflatten_does_not():
    model = made()
    with nnx.split_context() as ctx:
        graphdef, flat = ctx.flatten(model)
    assert isinstance(flat, nnx.FlatState)
    with nnx.merge_context() as ctx:
        assert ctx.unflatten(graphdef, flat).a is model.a
    with nnx.merge_context() as ctx:
        assert ctx.merge(graphdef, flat.to_nested_state()).a is not model.a


def test_flatten_without_paths_gives_a_list():
    with nnx.split_context() as ctx:
        graphdef, leaves = ctx.flatten(made(), with_paths=False)
        with pytest.raises(ValueError, match="Cannot use filters with with_paths=Fal"):
            ctx.flatten(made(), nnx.Param, with_paths=False)
    assert leaves == [1.0, 2.0] and all(isinstance(x, jax.Array) for x in leaves)
    with nnx.merge_context() as ctx:
        assert ctx.unflatten(graphdef, leaves).b.w[...] == 2.0
        with pytest.raises(ValueError, match="Cannot use multiple flat_states"):
            ctx.unflatten(graphdef, leaves, leaves)


@pytest.mark.parametrize("ref", [False, True])
def test_lists_of_leaves_make_all_four_steps(ref):
    with nnx.var_defaults(ref=ref):
        model = made()
    a, w = model.a, model.b.w

    @jax.jit
    def change(leaves):
        with nnx.merge_context("test", inner=True) as ctx:
            inner = ctx.unflatten(graphdef, leaves)
        inner.a[...] += 4
        inner.b.w[...] *= 3
        inner.c = inner.a
        with nnx.split_context("test") as ctx:
            return ctx.flatten(inner, with_paths=False)

    with nnx.update_context("test"):
        with nnx.split_context("test") as ctx:
            graphdef, leaves = ctx.flatten(model, with_paths=False)
        new_graphdef, new_leaves = change(leaves)
        with nnx.merge_context("test", inner=False) as ctx:
            assert ctx.unflatten(new_graphdef, new_leaves) is model
    assert model.a is model.c is a and a[...] == 5.0 and a.tag == "x"
    assert model.b.w is w and w[...] == 6.0 and w.ref is ref


def test_contexts_are_empty_after_their_block():
    with nnx.split_context() as split:
        graphdef, state = split.split(made())
    with nnx.merge_context() as merge:
        merge.merge(graphdef, state)
    for context, name in ((split, "ref_index"), (merge, "index_ref")):
        assert not hasattr(context, name) and not hasattr(context, "ctxtag")


# --------------------------------------------------------------------- update contexts


def test_missing_contexts_and_directions_are_errors():
    missing = "No update context found for tag"
    with pytest.raises(ValueError, match=missing):
        nnx.current_update_context("missing")
    with pytest.raises(ValueError, match=missing), nnx.split_context("missing"):
        pass
    merging = nnx.merge_context("missing", inner=True)
    with pytest.raises(ValueError, match=missing), merging:
        pass
    message = "inner_merge must be specified when using ctxtag"
    with nnx.update_context("test"), pytest.raises(ValueError, match=message):
        with nnx.merge_context("test"):
            pass


def test_contexts_nest_per_tag_and_thread():
    stacks = nnx.graphlib.GRAPH_CONTEXT.update_context_stacks

    def elsewhere():
        with pytest.raises(ValueError):
            nnx.current_update_context("test")

    assert not stacks
    with nnx.update_context("test") as outer, nnx.update_context("b") as other:
        with nnx.update_context("test") as inner:
            assert nnx.current_update_context("test") is inner
            assert [*map(id, stacks["test"])] == [id(outer), id(inner)]
            threads.run_in_threads(elsewhere)
        assert nnx.current_update_context("test") is outer
        assert nnx.current_update_context("b") is other
    assert not stacks


def test_contexts_end_with_exceptions_and_are_equal_and_static_for_jax():
    with pytest.raises(KeyError), nnx.update_context("test"):
        raise KeyError
    with pytest.raises(ValueError):
        nnx.current_update_context("test")
    with nnx.update_context("a") as a, nnx.update_context("b") as b:
        assert a == b and hash(a) == hash(b) and jax.tree.leaves(a) == []
