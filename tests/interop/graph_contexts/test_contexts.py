"""The older contexts, and their protocol (contract `graph-state`, section 10)."""

import threading

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from tests import zoo


def make():
    inner = zoo.Box(w=nnx.Param(jnp.array(2.0)))
    return zoo.Box(a=nnx.Param(jnp.array(1.0), tag="x"), b=inner, static=1)


def update_through(model, change, transform=lambda f: f):
    """The four steps; the second and third inside `transform`."""

    @nnx.update_context("test")
    def run():
        with nnx.split_context("test") as ctx:
            graphdef, state = ctx.split(model)

        @transform
        def inside(state):
            with nnx.merge_context("test", inner=True) as ctx:
                inner = ctx.merge(graphdef, state)
            change(inner)
            with nnx.split_context("test") as ctx:
                return ctx.split(inner)

        new_graphdef, new_state = inside(state)
        with nnx.merge_context("test", inner=False) as ctx:
            return ctx.merge(new_graphdef, new_state)

    return run()


CHANGES = {
    "value": (lambda m: m.a.set_value(jnp.array(5.0)), lambda m: m.a[...] == 5.0),
    "new": (lambda m: setattr(m, "n", nnx.Param(m.a * 3)), lambda m: m.n[...] == 3.0),
    "deleted": (lambda m: delattr(m, "static"), lambda m: not hasattr(m, "static")),
    "static": (lambda m: setattr(m, "static", 7), lambda m: m.static == 7),
    "alias": (lambda m: setattr(m, "c", m.a), lambda m: m.c is m.a),
    "self": (lambda m: setattr(m, "me", m), lambda m: m.me is m),
    "module": (
        lambda m: setattr(m, "d", nnx.Dict(x=nnx.Param(jnp.array(1.0)))),
        lambda m: m.d.x[...] == 1.0,
    ),
    "metadata": (lambda m: m.a.set_metadata(tag="y"), lambda m: m.a.tag == "y"),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_four_steps_update_the_original_object(name, transform):
    change, arrived = CHANGES[name]
    model = make()
    variable, inner = model.a, model.b
    out = update_through(model, change, transform)
    assert out is model and model.a is variable and model.b is inner
    assert arrived(model)
    assert not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(variable))


def test_identity_follows_the_object():
    def swap(m):
        m.a, m.b.w = m.b.w, m.a

    model = make()
    a, w = model.a, model.b.w
    update_through(model, swap, jax.jit)
    assert model.a is w and model.b.w is a


# ----------------------------------------------------------- split and merge contexts


def test_second_split_refers_to_the_first():
    model = make()
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
        graphdef, params, rest = ctx.split(make(), *filters)
    assert list(params) == ["a"] and list(rest) == ["b"]
    with nnx.merge_context() as ctx:
        assert ctx.merge(graphdef, params, rest).b.w[...] == 2.0
    with nnx.split_context() as ctx:
        graphdef, *flat = ctx.flatten(make(), *filters)
    with nnx.merge_context() as ctx:
        assert ctx.unflatten(graphdef, *flat).b.w[...] == 2.0


def test_merge_copies_variables_and_unflatten_does_not():
    model = make()
    with nnx.split_context() as ctx:
        graphdef, flat = ctx.flatten(model)
    assert isinstance(flat, nnx.FlatState)
    with nnx.merge_context() as ctx:
        assert ctx.unflatten(graphdef, flat).a is model.a
    with nnx.merge_context() as ctx:
        assert ctx.merge(graphdef, flat.to_nested_state()).a is not model.a


def test_flatten_without_paths_gives_a_list():
    with nnx.split_context() as ctx:
        graphdef, leaves = ctx.flatten(make(), with_paths=False)
        with pytest.raises(ValueError, match="Cannot use filters with with_paths=Fal"):
            ctx.flatten(make(), nnx.Param, with_paths=False)
    assert leaves == [1.0, 2.0] and all(isinstance(x, jax.Array) for x in leaves)
    with nnx.merge_context() as ctx:
        assert ctx.unflatten(graphdef, leaves).b.w[...] == 2.0
        with pytest.raises(ValueError, match="Cannot use multiple flat_states"):
            ctx.unflatten(graphdef, leaves, leaves)


@pytest.mark.parametrize("ref", [False, True])
def test_lists_of_leaves_make_all_four_steps(ref):
    with nnx.var_defaults(ref=ref):
        model = make()
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
        graphdef, state = split.split(make())
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
    stacks, seen = nnx.graphlib.GRAPH_CONTEXT.update_context_stacks, []

    def elsewhere():
        with pytest.raises(ValueError):
            nnx.current_update_context("test")
        seen.append(True)

    assert not stacks
    with nnx.update_context("test") as outer, nnx.update_context("b") as other:
        with nnx.update_context("test") as inner:
            assert nnx.current_update_context("test") is inner
            assert [*map(id, stacks["test"])] == [id(outer), id(inner)]
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
        assert nnx.current_update_context("test") is outer
        assert nnx.current_update_context("b") is other
    assert seen == [True] and not stacks


def test_contexts_end_with_exceptions_and_are_equal_and_static_for_jax():
    with pytest.raises(KeyError), nnx.update_context("test"):
        raise KeyError
    with pytest.raises(ValueError):
        nnx.current_update_context("test")
    with nnx.update_context("a") as a, nnx.update_context("b") as b:
        assert a == b and hash(a) == hash(b) and jax.tree.leaves(a) == []
