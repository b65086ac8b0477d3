"""Clone, pop, set_metadata, as_pure (contract section 8)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests.strategies import Block, param


def pointer(x):
    return x.unsafe_buffer_pointer()


# -------------------------------------------------------------------------------- clone


def test_clone_makes_new_variables_of_the_same_arrays(graph):
    m = Block(kernel=nnx.Param(jnp.ones(2), tag="x"), array=jnp.ones(2), n=3)
    c = nnx.clone(m, graph=graph)
    assert c is not m and c.kernel is not m.kernel
    assert c.kernel[...] is m.kernel[...] and c.array is m.array and c.n == 3
    c.kernel.set_metadata(tag="y")
    c.kernel[...] = jnp.zeros(2)
    assert m.kernel.tag == "x" and m.kernel[...].tolist() == [1.0, 1.0]


def test_clone_can_share_variables(graph):
    m = Block(kernel=param())
    c = nnx.clone(m, False, graph=graph)
    assert c is not m and c.kernel is m.kernel


def test_clone_copies_all_arrays_on_request(graph):
    m = Block(
        a=param(),
        b=nnx.Variable({"x": jnp.ones(2)}),
        c=jnp.ones(2),
        key=nnx.Variable(jax.random.key(0)),
        weak=nnx.Param(jnp.asarray(1.0), tag="t"),
    )
    c = nnx.clone(m, arrays=True, graph=graph)
    before, after = jax.tree.leaves(m), jax.tree.leaves(c)
    assert jax.tree.structure(m) == jax.tree.structure(c)
    for x, y in zip(before, after, strict=True):
        assert x is not y and jnp.all(x == y)
        assert jax.typeof(x) == jax.typeof(y) and x.sharding == y.sharding
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            assert pointer(x) != pointer(y)


def test_original_and_copy_can_be_donated_together():
    m = Block(a=param())
    pair = {"model": m, "copy": nnx.clone(m, arrays=True)}
    out = jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)(pair)
    assert out["copy"].a[...].tolist() == [2.0, 2.0]


def test_only_jax_arrays_are_copied(graph):
    numpy, spec = np.ones(2), jax.ShapeDtypeStruct((2,), jnp.float32)
    m = Block(a=nnx.data(3), b=numpy, c=nnx.data(spec), d=nnx.data("text"))
    c = nnx.clone(m, arrays=True, graph=graph)
    assert (c.a, c.c, c.d) == (3, spec, "text") and c.b is numpy


@pytest.mark.parametrize("arrays", [True, False])
def test_refs_become_new_refs(graph, arrays):
    m = Block(v=nnx.Param(jnp.ones(2), ref=True), r=jax.new_ref(jnp.ones(2)))
    c = nnx.clone(m, arrays=arrays, graph=graph)
    assert c.v.ref and isinstance(c.r, jax.Ref)
    c.v[...], c.r[...] = jnp.zeros(2), jnp.zeros(2)
    assert m.v[...].tolist() == m.r[...].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("arrays", [True, False])
def test_what_shares_a_ref_still_does(arrays):
    v = nnx.Param(jnp.ones(2), ref=True)
    for node in ([v, v.get_raw_value()], [v.get_raw_value(), v]):
        c = nnx.clone(node, arrays=arrays)
        if not isinstance(c[0], nnx.Variable):
            c = c[::-1]
        assert c[0].get_raw_value() is c[1] and c[1] is not v.get_raw_value()


def test_arrays_without_variables_is_refused():
    phrase = "If arrays is True, variables should be also True"
    with pytest.raises(ValueError, match=phrase):
        nnx.clone(Block(), variables=False, arrays=True)


def test_clone_keeps_sharing_and_tree_mode_refuses_it():
    p = param()
    m = Block(a=p, b=[1], c=p)
    m.me = m
    c = nnx.clone(m)
    assert c.a is c.c and c.a is not p and c.me is c
    with pytest.raises(ValueError, match="Duplicate"):
        nnx.clone([p, p], graph=False)


def test_clone_takes_states_variables_and_arrays(graph):
    state, array = nnx.State({"a": param()}), jnp.ones(2)
    c = nnx.clone((state, state["a"].copy()), graph=graph)
    assert isinstance(c[0], nnx.State) and c[0]["a"] is not state["a"]
    assert isinstance(nnx.clone(state["a"], graph=graph), nnx.Param)
    assert nnx.clone(array, graph=graph) is array
    copied = nnx.clone(array, arrays=True, graph=graph)
    assert pointer(copied) != pointer(array)


# ---------------------------------------------------------------------------------- pop


def test_pop_removes_and_returns():
    inner = Block(b=nnx.Intermediate(1))
    m = Block(a=nnx.Intermediate(2), inner=inner, c=param(), n=3)
    popped = nnx.pop(m, nnx.Intermediate)
    assert popped["a"].get_value() == 2 and popped["inner"]["b"].get_value() == 1
    assert not hasattr(m, "a") and not hasattr(inner, "b")
    assert sorted(m._pytree__nodes) == ["c", "inner", "n"]
    assert list(nnx.state(m)) == ["c"]


def test_the_first_filter_takes_a_leaf():
    m = Block(a=nnx.Intermediate(1), b=param(), c=jnp.ones(2), n=3, d=nnx.data(4))
    intermediate, other = nnx.pop(m, nnx.Intermediate, ...)
    assert list(intermediate) == ["a"] and list(other) == ["b", "c"]
    assert (m.n, m.d) == (3, 4)
    everything, nothing = nnx.pop(Block(a=param()), ..., nnx.Param)
    assert list(everything) == ["a"] and nothing == nnx.State({})


def test_pop_of_nothing():
    m = Block(a=param())
    assert nnx.pop(m, nnx.BatchStat) == nnx.State({})
    with pytest.raises(ValueError, match="Expected at least one filter"):
        nnx.pop(m)


def test_entries_of_dicts_are_removed():
    node = {"a": param(), "b": {"c": nnx.BatchStat(jnp.ones(1))}}
    assert list(nnx.pop(node, nnx.Param)) == ["a"]
    assert list(node) == ["b"]
    for kind in (nnx.Dict, nnx.State):
        d = kind({"x": param(), "y": 3})
        nnx.pop(d, nnx.Param)
        assert list(d) == ["y"]


def test_a_shared_variable_is_removed_at_its_first_path():
    p = param()
    m = Block(a=p, b=p)
    assert nnx.pop(m, nnx.Param)["a"] is p
    assert not hasattr(m, "a") and m.b is p


@pytest.mark.parametrize(
    ("node", "name"),
    [([param()], "list"), ((param(),), "tuple"), (nnx.List([param()]), "List")],
)
def test_items_of_sequences_are_not_popped(node, name):
    with pytest.raises(ValueError, match=f"Cannot pop key .*{name}"):
        nnx.pop({"z": node, "a": param()}, nnx.Param)


def test_a_failed_pop_changes_nothing():
    m = Block(a=param(), b=nnx.data([param()]))
    with pytest.raises(ValueError, match="Cannot pop key 0"):
        nnx.pop(m, nnx.Param)
    assert hasattr(m, "a")


@pytest.mark.parametrize("root", [param(), 42, jnp.ones(2)])
def test_a_root_must_be_a_node(root):
    with pytest.raises(RuntimeError, match="Unsupported type") as error:
        nnx.pop(root, ...)
    assert isinstance(error.value, TypeError)


# ------------------------------------------------------------------------- set_metadata


def test_metadata_is_set_where_the_filter_matches():
    m = Block(a=nnx.Param(jnp.ones(1), old=1), b=nnx.BatchStat(jnp.ones(1)))
    assert nnx.set_metadata(m, only=nnx.Param, new=2) is None
    assert m.a.get_metadata(exclude_required=True) == {"old": 1, "new": 2}
    assert m.b.get_metadata(exclude_required=True) == {}
    nnx.set_metadata(m, new=3)
    assert m.a.new == m.b.new == 3


def test_metadata_of_a_bare_variable():
    v = param()
    nnx.set_metadata(v, tag="x")
    assert v.tag == "x"


def test_older_names_of_metadata_are_mapped():
    m = Block(a=param())
    with pytest.warns(DeprecationWarning, match="out_sharding"):
        nnx.set_metadata(m, sharding=("x",))
    assert m.a.out_sharding == ("x",)


def test_misuse_of_set_metadata():
    m = Block(a=param())
    for key in ("ref", "hijax"):
        with pytest.raises(ValueError, match="Cannot change"):
            nnx.set_metadata(m, **{key: True})
    with pytest.raises(TypeError):
        nnx.set_metadata(m)
    nnx.set_metadata(m, only=nnx.BatchStat)


def test_set_metadata_follows_the_mode_in_force():
    p = param()
    with nnx.set_graph_mode(False), pytest.raises(ValueError, match="Duplicate"):
        nnx.set_metadata([p, p], tag="x")
    assert not p.has_metadata("tag")


# ------------------------------------------------------------------------------ as_pure


def test_as_pure_gives_raw_values():
    m = Block(
        a=param(), b=nnx.Param(jnp.ones(2), ref=True), c=jax.new_ref(jnp.ones(2)), n=3
    )
    pure = nnx.as_pure(m)
    assert type(pure) is Block and pure.n == 3 and pure.a is m.a.get_raw_value()
    assert all(isinstance(x, jax.Array) for x in (pure.a, pure.b, pure.c))
    assert not any(isinstance(x, jax.Ref) for x in (pure.a, pure.b, pure.c))
    assert isinstance(nnx.as_pure(nnx.state(m)), nnx.State)


def test_as_pure_enters_values():
    nested = nnx.Variable({"x": nnx.Variable((1, nnx.Param(2)))})
    assert nnx.as_pure(nested) == {"x": (1, 2)}
    assert nnx.as_pure(param()).tolist() == [1.0, 1.0]
