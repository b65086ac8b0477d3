"""Update, clone, pop, set_metadata, as_pure (contract sections 7 and 8), and modes."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import comparisons, tables
from tests.strategies import Block, Hidden, Moments, Node, param

Pair = collections.namedtuple("Pair", ["x", "y"])


def values(x):
    return x[...].tolist()


# ---------------------------------------------------------------------- what is written


def test_a_variable_takes_value_and_metadata_and_keeps_identity_and_type():
    m = Block(a=nnx.Param(jnp.ones(2), old=1))
    variable, given = m.a, nnx.BatchStat(jnp.zeros(3), new=2)
    nnx.update(m, nnx.State({"a": given}))
    assert m.a is variable and type(m.a) is nnx.Param
    assert m.a[...] is given[...]
    assert m.a.get_metadata(exclude_required=True) == {"new": 2}
    given[...] = jnp.ones(3)
    assert values(m.a) == [0.0, 0.0, 0.0]


def test_raw_values_replace_the_raw_value_without_checks_and_no_other():
    m = Block(a=nnx.Param(jnp.ones(2), old=1), b=param(2.0), n=3)
    nnx.update(m, {"a": 3})
    assert m.a.get_raw_value() == 3 and m.a.old == 1
    assert values(m.b) == [2.0, 2.0] and m.n == 3


def test_later_states_win_and_empty_ones_change_nothing():
    m = Block(a=param(), b=param())
    nnx.update(m, nnx.State({"a": nnx.State({})}))
    nnx.update(m, {"a": {}}, {})
    nnx.update(m.a, nnx.State({}))
    assert values(m.a) == [1.0, 1.0]
    nnx.update(m, {"a": jnp.zeros(2), "b": jnp.zeros(2)}, nnx.State({"b": jnp.ones(1)}))
    assert values(m.a) == [0.0, 0.0] and values(m.b) == [1.0]


def test_dict_valued_variables():
    m = Block(a=nnx.Variable({"x": 1, "y": 2}))
    nnx.update(m, nnx.State({"a": {"x": 3}}))
    value = m.a.get_raw_value()
    assert value == {"x": 3} and type(value) is dict


def test_attributes_are_set_with_the_checks_of_pytrees():
    m = Block(array=jnp.ones(2), n=3, d=nnx.data(4))
    nnx.update(m, {"array": jnp.zeros(1), "n": 5, "d": jnp.ones(1)})
    assert m.array.tolist() == [0.0] and m.n == 5 and m.d.tolist() == [1.0]
    with pytest.raises(ValueError, match="Cannot assign data value of type"):
        nnx.update(m, {"array": jnp.ones(2), "n": jnp.ones(2)})
    assert m.array.tolist() == [0.0]


def test_new_keys_make_attributes_and_variables_are_copied():
    m, p, array = Block(), param(), jnp.ones(2)
    nnx.update(m, {"a": p, "b": array, "c": 3})
    assert type(m.a) is nnx.Param and m.a is not p and m.a[...] is p[...]
    assert m.b is array and m.c == 3


def test_an_existing_variable_is_updated_once_for_all_its_paths():
    p = param()
    m = Block(a=p, b=p)
    nnx.update(m, {"b": jnp.zeros(2)})
    assert m.a is m.b and values(m.a) == [0.0, 0.0]


# ----------------------------------------------------------------------- forms of state


def test_a_variable_root():
    v = param()
    nnx.update(v, jnp.zeros(2))
    assert values(v) == [0.0, 0.0]
    nnx.update(v, nnx.State({}), param(3.0))
    assert values(v) == [3.0, 3.0]
    with pytest.raises(ValueError, match="Expected exactly one non-empty state"):
        nnx.update(v, param(), param())


FORMS = {
    "State": nnx.state,
    "FlatState": lambda m: nnx.to_flat_state(nnx.state(m)),
    "GraphState": nnx.unpack,
    "dict": lambda m: nnx.to_pure_dict(nnx.state(m)),
    "Module": lambda m: m,
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_state(form):
    m = Block(inner=nnx.List([param(), param()]), b=param())
    given = Block(inner=nnx.List([param(5.0), param(6.0)]), b=param(7.0))
    nnx.update(m, FORMS[form](given))
    assert [values(v)[0] for v in (*m.inner, m.b)] == [5.0, 6.0, 7.0]


def test_strings_may_stand_for_integer_keys():
    m = Block(inner=nnx.List([param() for _ in range(12)]), plain=nnx.data([param()]))
    new = {str(i): jnp.full(2, float(i)) for i in range(12)}
    nnx.update(m, {"inner": new, "plain": {"0": jnp.zeros(2)}})
    assert [values(v)[0] for v in m.inner] == list(range(12))
    assert values(m.plain[0]) == [0.0, 0.0]


def test_a_tuple_root():
    roots = Block(a=param()), [param()]
    state = jax.tree.map(lambda x: x + 1, nnx.state(roots))
    nnx.update(roots, state)
    assert values(roots[0].a) == values(roots[1][0]) == [2.0, 2.0]


# --------------------------------------------------------------------------- containers


def test_items_of_lists_and_dicts_are_set():
    node = {"l": [jnp.ones(1), 3], "d": {"a": jnp.ones(1)}}
    nnx.update(node, {"l": {0: jnp.zeros(1), 1: 4}, "d": {"b": jnp.zeros(1)}})
    assert node["l"][0].tolist() == [0.0] and node["l"][1] == 4
    assert sorted(node["d"]) == ["a", "b"]


@tables.cases(
    "node, key",
    ((jnp.ones(1), param()), 0),
    (Pair(jnp.ones(1), param()), "x"),
    (Moments(param(), jnp.ones(1)), "mean"),
)
def test_leaves_of_immutable_containers_can_t_be_set(node, key):
    phrase = rf"Cannot set key {key!r} .*{type(node).__name__}"
    with pytest.raises(ValueError, match=phrase):
        nnx.update(node, {key: jnp.zeros(1)})


def test_variables_in_immutable_containers_are_updated():
    node = (Pair(param(), 1), Moments(param(), 2))
    nnx.update(node, {0: {"x": jnp.zeros(2)}, 1: {"variance": jnp.zeros(2)}})
    assert values(node[0].x) == values(node[1].variance) == [0.0, 0.0]


def test_states_are_containers_that_can_be_set():
    state = nnx.State({"a": jnp.ones(1), "b": {"c": jnp.ones(1)}})
    nnx.update(state, {"a": jnp.zeros(1), "b": {"c": jnp.zeros(1)}, "d": 3})
    assert (state.a, state.b.c, state.d) == (0, 0, 3)


@pytest.mark.parametrize("key", [3, (1, 2)])
@tables.cases("make", lambda: nnx.Dict(a=param()), lambda: Block(a=param()))
def test_a_name_that_is_no_string_is_an_error(make, key):
    m = make()
    state = {"b": {key: param(), "a": param(2.0)}}
    with pytest.raises(ValueError, match="(?s)Cannot set key .*'b/.*Use strings"):
        nnx.update({"b": m}, state)
    assert values(m.a) == [1.0, 1.0]


def test_a_list_is_not_made_longer():
    with pytest.raises(IndexError, match="out of range"):
        nnx.update([jnp.ones(1)], {1: jnp.ones(1)})


@pytest.mark.parametrize("keys", [[2, 3], [3, 2], ["3", "2"]])
def test_new_items_of_a_list_come_in_the_order_of_their_indices(keys):
    model = Block(items=nnx.List([param(), param()]))
    nnx.update(model, {"items": {key: jnp.full(1, float(key)) for key in keys}})
    assert [x.item() for x in model.items[2:]] == [2.0, 3.0]


@pytest.mark.parametrize("keys", [[7], [2, 4], [-1]])
def test_an_item_that_would_get_another_index_is_an_error(keys):
    model = Block(items=nnx.List([param(), param()]), other=param())
    before = values(model.other)
    state = {"other": jnp.zeros(2), "items": {key: jnp.ones(1) for key in keys}}
    with pytest.raises(IndexError, match=r"out of range at 'items/.*has 2 items"):
        nnx.update(model, state)
    assert len(model.items) == 2
    assert values(model.other) == before


# ------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("value", [jnp.ones(2), param()])
def test_a_leaf_can_t_replace_a_node(value):
    with pytest.raises(ValueError, match="Expected a subgraph for 'a'"):
        nnx.update(Block(a=Block()), {"a": value})


@pytest.mark.parametrize("state", [3, jnp.ones(2), None, "text"])
def test_a_state_must_be_a_mapping(state):
    with pytest.raises(TypeError, match="mapping.*got"):
        nnx.update(Block(a=param()), state)


def test_a_failed_update_changes_nothing():
    m = Block(a=param(), b=Block())
    with pytest.raises(ValueError, match="Expected a subgraph"):
        nnx.update(m, {"a": jnp.zeros(2), "b": jnp.zeros(2)})
    assert values(m.a) == [1.0, 1.0]


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
    with pytest.raises(ValueError, match="If arrays is True, variables should be also"):
        nnx.clone(m, variables=False, arrays=True, graph=graph)


def test_clone_copies_all_arrays_on_request(graph):
    m = Block(a=param(), b=nnx.Variable({"x": jnp.ones(2)}), c=jnp.ones(2))
    m.key = nnx.Variable(jax.random.key(0))
    m.weak = nnx.Param(jnp.asarray(1.0), tag="t")
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


@pytest.mark.parametrize("kind", [list, tuple, nnx.List])
def test_items_of_sequences_are_not_popped(kind):
    with pytest.raises(ValueError, match=f"Cannot pop key .*{kind.__name__}"):
        nnx.pop({"z": kind([param()]), "a": param()}, nnx.Param)


@tables.cases("wrap", lambda s: s, lambda s: Block(s=nnx.data(s)), lambda s: [s])
def test_leaves_of_mappings_with_any_keys_are_popped(wrap):
    """Also at integers, as in the state of a List, and beside these."""
    state = nnx.State({"a": {"b": param(), "c": {1: param(), 2: {"d": param()}}}})
    popped = nnx.to_flat_state(nnx.pop(wrap(state), nnx.Param))
    assert [path[-1] for path, _ in popped] == ["b", 1, "d"]
    assert state == {"a": {"c": {2: {}}}}
    graph_state = nnx.unpack({"a": {"b": param(), "c": {1: param()}}})
    assert nnx.pop(graph_state, nnx.PathContains("b"))["a"]["b"].shape == (2,)
    assert nnx.to_flat_state(graph_state).paths == (("a", "c", 1),)


def test_names_that_were_changed_in_vars_are_popped():
    m = Block(a=param())
    nnx.state(m)
    vars(m)["b"] = vars(m).pop("a")
    assert list(nnx.pop(m, nnx.Param)) == ["b"] and not hasattr(m, "b")


def test_a_failed_pop_changes_nothing():
    m = Block(a=param(), b=nnx.data([param()]))
    with pytest.raises(ValueError, match="Cannot pop key 0"):
        nnx.pop(m, nnx.Param)
    assert hasattr(m, "a")


@pytest.mark.parametrize("root", [42, jnp.ones(2), "text"])
def test_a_root_must_be_a_node(root):
    for change, argument in ((nnx.pop, ...), (nnx.update, {})):
        with pytest.raises(RuntimeError, match="Unsupported type") as error:
            change(root, argument)
        assert isinstance(error.value, TypeError)
    with pytest.raises(RuntimeError, match="Unsupported type"):
        nnx.pop(param(), ...)


# ------------------------------------------------------------------------- set_metadata


def test_metadata_is_set_where_the_filter_matches():
    m = Block(a=nnx.Param(jnp.ones(1), old=1), b=nnx.BatchStat(jnp.ones(1)))
    assert nnx.set_metadata(m, only=nnx.Param, new=2) is None
    assert m.a.get_metadata(exclude_required=True) == {"old": 1, "new": 2}
    assert m.b.get_metadata(exclude_required=True) == {}
    nnx.set_metadata(m, new=3)
    assert m.a.new == m.b.new == 3


def test_metadata_of_a_bare_variable_and_under_older_names():
    v = param()
    nnx.set_metadata(v, tag="x")
    with pytest.warns(DeprecationWarning, match="out_sharding"):
        nnx.set_metadata([v], sharding=("x",))
    assert v.tag == "x" and v.out_sharding == ("x",)


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


def test_as_pure_gives_raw_values_and_enters_them():
    refs = {"b": nnx.Param(jnp.ones(2), ref=True), "c": jax.new_ref(jnp.ones(2))}
    m = Block(a=param(), **refs, n=3)
    pure = nnx.as_pure(m)
    assert type(pure) is Block and pure.n == 3 and pure.a is m.a.get_raw_value()
    for x in (pure.a, pure.b, pure.c):
        assert isinstance(x, jax.Array) and not isinstance(x, jax.Ref)
    assert isinstance(nnx.as_pure(nnx.state(m)), nnx.State)
    nested = nnx.Variable({"x": nnx.Variable((1, nnx.Param(2)))})
    assert nnx.as_pure(nested) == {"x": (1, 2)}
    assert nnx.as_pure(param()).tolist() == [1.0, 1.0]


# ------------------------------------------------------------------ graph and tree mode

TREE_FUNCTIONS = {
    "split": lambda x: nnx.split(x, graph=False),
    "flatten": lambda x: nnx.flatten(x, graph=False),
    "state": lambda x: nnx.state(x, graph=False),
    "graphdef": lambda x: nnx.graphdef(x, graph=False),
    "clone": lambda x: nnx.clone(x, graph=False),
    "iter_graph": lambda x: list(nnx.iter_graph(x, graph=False)),
    "recursive_map": lambda x: nnx.recursive_map(lambda p, v: v, x, graph=False),
}
EACH = pytest.mark.parametrize("name", TREE_FUNCTIONS)
SLASHED = ("iter_graph", "recursive_map")


# -------------------------------------------------------------------------- tree errors


@EACH
@tables.cases(
    "shared", param(), nnx.Param(jnp.ones(2), ref=True), jax.new_ref(jnp.ones(2))
)
def test_shared_variables_and_refs_are_refused(name, shared):
    form = "- {}/bias\n" if name in SLASHED else "- [{}].bias\n"
    told = repr(shared), "found at paths", form.format(0), form.format(1)
    ways_out = "Remove", "nnx.clone", f"nnx.{name}(..., graph=True)"
    reason = "does not support shared references"
    ways_out += (f"nnx.compat.{name}",)
    with comparisons.raises(ValueError, *told, reason, *ways_out) as error:
        TREE_FUNCTIONS[name]([Block(bias=shared), Block(bias=shared)])
    assert str(error.value).startswith("Duplicate")


def test_ways_out_that_do_not_exist_are_not_named():
    p = param()
    with pytest.raises(ValueError, match="Duplicate") as error:
        nnx.map(lambda path, v: v, [p, p], graph=False)
    assert "nnx.compat.map" not in str(error.value)
    assert "graph=True" in str(error.value)


@EACH
def test_cycles_are_refused(name):
    m = Block()
    m.me = m
    with pytest.raises(ValueError, match="(?s)Cycle detected.*Block.*found at paths"):
        TREE_FUNCTIONS[name]([m])


@pytest.mark.parametrize("name", ["split", "iter_graph", "recursive_map"])
def test_cycles_do_not_wear_out_the_stack(name):
    m = Block(inner=Block())
    m.inner.up = m
    for _ in range(300):
        with pytest.raises(ValueError, match="Cycle detected"):
            TREE_FUNCTIONS[name]({"a": [m]})


@tables.cases("call", nnx.split, nnx.state, nnx.clone, lambda x: nnx.pop(x, nnx.Param))
def test_containers_that_contain_themselves_are_refused_in_graph_mode(call):
    mapping = {"a": param()}
    mapping["b"] = (mapping,)
    for _ in range(300):  # JAX would have less of the stack with each
        with pytest.raises(ValueError, match="(?s)Cycle detected.*found at paths"):
            call(mapping)


@EACH
def test_objects_that_are_no_pytrees_are_refused(name):
    with comparisons.raises(ValueError, name, "pytree=False", "Found at path", "0"):
        TREE_FUNCTIONS[name]([Hidden()])
    with pytest.raises(ValueError, match="pytree=False") as error:
        TREE_FUNCTIONS[name](Hidden())
    assert "Found at path" not in str(error.value)


@pytest.mark.parametrize("function", [nnx.iter_children, nnx.iter_module_children])
def test_children_of_an_object_that_is_no_pytree(function):
    with comparisons.raises(ValueError, "pytree=False", function.__name__):
        list(function(Hidden(), graph=False))
    assert list(function(Hidden(), graph=True)) == []


@EACH
def test_shared_arrays_and_nodes_without_variables_are_accepted_as_two(name):
    inner, x = Node(), jnp.ones(2)
    TREE_FUNCTIONS[name]([inner, inner, x, x])
    merged = nnx.merge(*nnx.split([inner, inner], graph=False))
    assert merged[0] is not merged[1]
    assert len(nnx.flatten([x, x], graph=False)[1]) == 2


# -------------------------------------------------------------------- choosing the mode


def is_graph():
    return bool(nnx.state([1, jnp.ones(1)], nnx.PathContains(0)) == nnx.State({}))


def test_functions_follow_the_mode_in_force():
    assert is_graph()
    with nnx.set_graph_mode(False):
        assert not is_graph()
        assert nnx.state([1], graph=True) == nnx.State({})
    assert is_graph()


@pytest.mark.parametrize("setting", [nnx.set_graph_mode, nnx.set_graph_updates])
def test_instances_know_both_values_and_the_argument_is_positional(setting):
    with setting(True):
        changed = setting(False)
        assert changed.prev_value is True and changed.new_value is False
    with pytest.raises(TypeError):
        setting(value=True)


def test_unknown_flags_are_refused():
    with pytest.raises(LookupError):
        nnx.config.update("nnx_graph_mood", True)


def test_new_attributes_have_the_order_of_the_state():
    model = nnx.Pytree()
    nnx.update(model, {"z": 1, "a": 2})
    assert [name for name in vars(model) if not name.startswith("_")] == ["z", "a"]


@pytest.mark.parametrize("name", ["raw_mapping", "items", "a"])
def test_an_object_with_any_names_of_items_is_a_state(name):
    model = nnx.Dict({name: nnx.Param(jnp.zeros(1))})
    given = nnx.Dict({name: nnx.Param(jnp.ones(1))})
    nnx.update(model, given)
    assert model[name][...].tolist() == [1]
    assert nnx.to_pure_dict(given) == {name: jnp.ones(1)}
