"""Update (contract section 7)."""

import collections

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from tests.strategies import Block, Moments, param

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


def test_raw_values_replace_the_raw_value_without_checks():
    m = Block(a=nnx.Param(jnp.ones(2), old=1))
    nnx.update(m, {"a": 3})
    assert m.a.get_raw_value() == 3 and m.a.old == 1


def test_other_attributes_stay():
    m = Block(a=param(1.0), b=param(2.0), n=3)
    nnx.update(m, {"a": jnp.zeros(2)})
    assert values(m.b) == [2.0, 2.0] and m.n == 3


def test_later_states_win():
    m = Block(a=param(), b=param())
    nnx.update(m, {"a": jnp.zeros(2), "b": jnp.zeros(2)}, nnx.State({"b": jnp.ones(1)}))
    assert values(m.a) == [0.0, 0.0] and values(m.b) == [1.0]


def test_empty_states_change_nothing():
    m = Block(a=param())
    nnx.update(m, nnx.State({"a": nnx.State({})}))
    nnx.update(m, {"a": {}}, {})
    nnx.update(m.a, nnx.State({}))
    assert values(m.a) == [1.0, 1.0]


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


@pytest.mark.parametrize(
    "form",
    [
        lambda m: nnx.state(m),
        lambda m: nnx.to_flat_state(nnx.state(m)),
        lambda m: nnx.unpack(m),
        lambda m: nnx.to_pure_dict(nnx.state(m)),
        lambda m: m,
    ],
    ids=["State", "FlatState", "GraphState", "dict", "Module"],
)
def test_every_form_of_state(form):
    m = Block(inner=nnx.List([param(), param()]), b=param())
    given = Block(inner=nnx.List([param(5.0), param(6.0)]), b=param(7.0))
    nnx.update(m, form(given))
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


def test_a_step_of_gradient_descent():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    kernel = model.kernel[...]
    params = nnx.state(model, nnx.Param)
    grads = jax.tree.map(jnp.ones_like, params)
    nnx.update(model, jax.tree.map(lambda p, g: p - 0.5 * g, params, grads))
    assert jnp.allclose(model.kernel[...], kernel - 0.5)


# --------------------------------------------------------------------------- containers


def test_items_of_lists_and_dicts_are_set():
    node = {"l": [jnp.ones(1), 3], "d": {"a": jnp.ones(1)}}
    nnx.update(node, {"l": {0: jnp.zeros(1), 1: 4}, "d": {"b": jnp.zeros(1)}})
    assert node["l"][0].tolist() == [0.0] and node["l"][1] == 4
    assert sorted(node["d"]) == ["a", "b"]


@pytest.mark.parametrize(
    ("node", "key"),
    [
        ((jnp.ones(1), param()), 0),
        (Pair(jnp.ones(1), param()), "x"),
        (Moments(param(), jnp.ones(1)), "mean"),
    ],
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


@pytest.mark.parametrize("root", [42, jnp.ones(2), "text"])
def test_a_root_must_be_a_node(root):
    with pytest.raises(RuntimeError, match="Unsupported type"):
        nnx.update(root, {})


@pytest.mark.parametrize("state", [3, jnp.ones(2), None, "text"])
def test_a_state_must_be_a_mapping(state):
    with pytest.raises(TypeError, match="mapping.*got"):
        nnx.update(Block(a=param()), state)


def test_a_failed_update_changes_nothing():
    m = Block(a=param(), b=Block())
    with pytest.raises(ValueError, match="Expected a subgraph"):
        nnx.update(m, {"a": jnp.zeros(2), "b": jnp.zeros(2)})
    assert values(m.a) == [1.0, 1.0]
