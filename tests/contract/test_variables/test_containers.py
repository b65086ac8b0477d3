"""List, Dict, Sequential, TrainState (contract, section 15)."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest

import graftree as nnx
from tests.zoo import Scale


def status(obj, name):
    return vars(obj)["_pytree__nodes"][name]


# ----------------------------------------------------------------------------- List


def test_items_are_attributes_named_by_their_index():
    items = nnx.List([nnx.Param(1), "x"])
    assert isinstance(vars(items)["0"], nnx.Param) and vars(items)["1"] == "x"
    assert items._length == 2 and isinstance(items, nnx.Module)


def test_paths_have_integers_in_numeric_order():
    items = nnx.List([nnx.Param(i) for i in range(12)])
    assert list(nnx.state(items)) == list(range(12))
    keys = [path[0] for path, _ in jax.tree_util.tree_flatten_with_path(items)[0]]
    assert keys == [jax.tree_util.SequenceKey(i) for i in range(12)]


def test_every_item_has_a_status_of_its_own():
    given = [nnx.data(1), nnx.static("a"), jnp.ones(1), nnx.data([nnx.Param(1)])]
    items = nnx.List(given)
    assert [status(items, str(i)) for i in range(4)] == [True, False, True, True]
    with pytest.raises(ValueError, match="Found data on value of type"):
        nnx.List([[jnp.ones(1)]])


def test_items_are_read_by_index_and_slice():
    items = nnx.List([1, 2, 3])
    assert (items[0], items[-1], items[1:]) == (1, 3, [2, 3])
    assert type(items[:]) is list
    for index in (3, -4):
        with pytest.raises(IndexError):
            items[index]
        with pytest.raises(IndexError):
            items[index] = 1
    with pytest.raises(TypeError):
        items["a"]


def test_items_are_written_by_index_and_slice():
    items = nnx.List([1, 2, 3])
    items[-1] = 30
    items[0:2] = (10, 20)
    assert list(items) == [10, 20, 30]
    for value, error in (([1], ValueError), (1, TypeError)):
        with pytest.raises(error):
            items[0:2] = value
    assert list(items) == [10, 20, 30]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.append(9),
        lambda x: x.insert(1, 9),
        lambda x: x.insert(-1, 9),
        lambda x: x.insert(100, 9),
        lambda x: x.insert(-100, 9),
        lambda x: x.extend([7, 8]),
        lambda x: x.__iadd__([7, 8]),
        lambda x: x.pop(),
        lambda x: x.pop(0),
        lambda x: x.pop(-2),
        lambda x: x.remove(2),
        lambda x: x.reverse(),
        lambda x: x.clear(),
        lambda x: x.__delitem__(1),
        lambda x: x.__delitem__(slice(0, 2)),
        lambda x: x.__delitem__(slice(None, None, 2)),
        lambda x: x.index(2),
        lambda x: x.count(2),
        lambda x: 2 in x,
        lambda x: list(reversed(x)),
        lambda x: bool(x),
    ],
)
def test_lists_behave_as_lists(change):
    mine, python = nnx.List([1, 2, 3, 2]), [1, 2, 3, 2]
    a, b = change(mine), change(python)
    assert list(mine) == python and len(mine) == len(python)
    assert a is mine if b is python else a == b


def test_empty_lists_are_false_and_none_adds_multiplies_or_sorts():
    assert not nnx.List() and nnx.List([0])
    items = nnx.List([1])
    for change in (lambda: items + [2], lambda: items * 2, lambda: items.sort()):
        with pytest.raises((TypeError, AttributeError)):
            change()


def test_structural_changes_move_items_with_their_status():
    items = nnx.List([nnx.data("d"), nnx.static("s"), jnp.ones(1)])
    items.insert(0, nnx.static("new"))
    items.reverse()
    del items[1]
    items.pop(0)
    assert list(items) == ["d", "new"]
    assert [status(items, str(i)) for i in range(2)] == [True, False]


def test_failed_changes_leave_the_list_alone():
    items = nnx.List([1, 2])
    for change in (
        lambda: items.extend([3, [jnp.ones(1)]]),
        lambda: items.insert(0, [jnp.ones(1)]),
        lambda: items.__setitem__(slice(0, 2), [3, [jnp.ones(1)]]),
    ):
        with pytest.raises(ValueError, match="Found data on value of type"):
            change()
        assert list(items) == [1, 2]


def test_update_changes_items_in_place_and_inserts_new_ones():
    first = nnx.Param(jnp.array(1.0))
    items = nnx.List([first])
    nnx.update(items, {0: jnp.array(5.0), 1: nnx.Param(jnp.array(2.0))})
    assert items[0] is first and first[...] == 5.0
    assert len(items) == 2 and items[1][...] == 2.0


def test_list_can_be_the_carry_of_a_loop():
    def body(_, items):
        items[0] = items[0] + 1
        return items

    out = jax.lax.fori_loop(0, 3, body, nnx.List([jnp.array(0), "s"]))
    assert type(out) is nnx.List and out[0] == 3 and out[1] == "s"


def test_lists_are_equal_element_by_element_and_hashed_by_identity():
    a, b, c = nnx.List([1, "x"]), nnx.List([1, "x"]), nnx.List([2, "x"])
    assert a == b and a != c and nnx.List([1]) != nnx.List([1, 1])
    assert nnx.List([jnp.ones(2)]) == nnx.List([jnp.ones(2)])
    assert nnx.List([jnp.ones(2)]) != nnx.List([jnp.zeros(2)])
    assert len({a, b}) == 2


# ----------------------------------------------------------------------------- Dict


def test_items_and_attributes_are_the_same():
    d = nnx.Dict({"a": 1}, b=nnx.Param(2))
    assert d["a"] == d.a == 1 and d.b is d["b"]
    d.c = 3
    d["a"] = 4
    assert d["c"] == 3 and d.a == 4
    assert nnx.Dict([("a", 1)])["a"] == 1 and isinstance(d, nnx.Module)


def test_missing_items_and_attributes():
    d = nnx.Dict()
    for look in (d.__getitem__, d.__delitem__):
        with pytest.raises(KeyError, match="a"):
            look("a")
    with pytest.raises(AttributeError):
        d.a


def test_dicts_behave_as_dicts():
    d = nnx.Dict(b=1, a=2)
    assert list(d) == list(d.keys()) == ["b", "a"] and list(d.values()) == [1, 2]
    assert list(d.items()) == [("b", 1), ("a", 2)] and len(d) == 2
    assert "a" in d and "x" not in d and d.get("x", 5) == 5
    assert d.pop("a") == 2 and d.setdefault("c", 3) == 3 and d.popitem() is not None
    d.update({"e": 4}, f=5)
    assert d["f"] == 5
    d.clear()
    assert len(d) == 0 and not d


def test_dicts_are_equal_as_mappings_and_hashed_by_identity():
    a, b = nnx.Dict(x=1, y=2), nnx.Dict(y=2, x=1)
    assert a == b and a == {"x": 1, "y": 2} and a != nnx.Dict(x=1)
    assert len({a, b}) == 2


@pytest.mark.parametrize("key", [1, ("a",), None])
def test_keys_are_strings(key):
    with pytest.raises(TypeError):
        nnx.Dict({key: 1})
    with pytest.raises(TypeError):
        nnx.Dict()[key] = 1


def test_keys_may_be_names_of_methods():
    d = nnx.Dict()
    assert "items" not in d and "sow" not in d
    d["items"] = nnx.Param(1)
    d["keys"] = 2
    assert "items" in d and list(d) == ["items", "keys"] and callable(d.items)
    assert dict(d.items())["keys"] == 2
    assert list(nnx.state(d)) == ["items"]
    merged = nnx.merge(*nnx.split(d))
    assert list(merged) == ["items", "keys"] and merged["keys"] == 2
    del d["items"]
    assert "items" not in d


def test_order_is_that_of_insertion_until_flattened():
    d = nnx.Dict(b=jnp.ones(1), a=jnp.ones(1))
    assert list(d) == ["b", "a"]
    assert list(jax.tree.map(lambda x: x, d)) == ["a", "b"]


# ------------------------------------------------------------------------ Sequential


def test_layers_are_a_list_and_the_module_iterates_over_them():
    model = nnx.Sequential(jnp.sin, jnp.cos)
    assert isinstance(model.layers, nnx.List) and list(model) == [jnp.sin, jnp.cos]
    assert not hasattr(model, "__len__") and not hasattr(model, "__getitem__")


def test_without_layers_the_input_comes_back():
    model = nnx.Sequential()
    assert model(1) == 1 and model(1, 2) == (1, 2) and model() is None
    assert model(a=1) == {"a": 1}


def test_tuples_become_arguments_and_dicts_keywords():
    pair, mapping = lambda x: (x, 2), lambda a, b: {"c": a, "d": b}
    assert nnx.Sequential(pair, mapping, lambda c, d: c - d)(5) == 3
    # As the keywords of the call are those of the first layer.
    assert nnx.Sequential(lambda x: x + 1, lambda y: y * 2)(x=1) == 4


def test_keywords_reach_the_layers_that_take_them():
    takes = lambda x, *, scale: x * scale  # noqa: E731
    takes_all = lambda x, **kwargs: (x, sorted(kwargs))  # noqa: E731
    model = nnx.Sequential(takes, lambda x: x + 1, takes_all)
    assert model(3, scale=2, unknown=1) == (7, ["scale", "unknown"])
    without_signature = nnx.Sequential(max, lambda x, scale: x * scale)
    assert without_signature(1, 2, scale=3) == 6


def test_layers_that_can_not_be_called_so_are_named():
    twice = r"(?s)Got multiple values for arguments.*Sequential\[1\]"
    with pytest.raises(TypeError, match=twice):
        nnx.Sequential(lambda x: {"a": x}, lambda a: a)(1, a=2)
    with pytest.raises(TypeError, match=r"Sequence\[1\]"):
        nnx.Sequential(jnp.sin, 3)(1.0)


def test_has_keyword_arg():
    has = nnx.helpers.has_keyword_arg
    assert has(lambda a: 1, "a") and has(lambda *, a: 1, "a")
    assert not has(lambda **a: 1, "a") and not has(lambda a, /: 1, "a")


# ------------------------------------------------------------------------ TrainState


@pytest.fixture
def train_state():
    graphdef, params = nnx.split(nnx.Dict(w=nnx.Param(jnp.array(2.0))))
    return nnx.TrainState.create(graphdef, params=params, tx=optax.sgd(0.1))


def test_train_state_is_a_frozen_pytree(train_state):
    assert train_state.step == 0 and isinstance(train_state.step, jax.Array)
    with pytest.raises(dataclasses.FrozenInstanceError):
        train_state.step = 1
    mapped = jax.tree.map(lambda x: x, train_state)
    assert type(mapped) is nnx.TrainState and mapped.tx is train_state.tx


def test_gradients_are_applied_by_the_optimizer(train_state):
    new = train_state.apply_gradients(jax.tree.map(jnp.ones_like, train_state.params))
    assert new.step == 1 and abs(new.params["w"][...] - 1.9) < 1e-6
    assert train_state.params["w"][...] == 2.0


def test_fields_can_be_added_and_replaced(train_state):
    class WithCounts(nnx.TrainState):
        counts: nnx.State

    counts = nnx.State({"c": nnx.Variable(jnp.array(0))})
    given = {"params": train_state.params, "tx": train_state.tx, "counts": counts}
    state = WithCounts.create(train_state.graphdef, **given)
    assert state.counts is counts and state.replace(step=5).step == 5


def test_apply_merges_the_states():
    graphdef, params = nnx.split(Scale(2.0))
    state = nnx.TrainState.create(graphdef, params=params, tx=optax.sgd(0.1))
    out, (graphdef, new) = state.apply("params")(3.0)
    assert out == 6.0 and state.apply(new)(2.0)[0] == 4.0
    with pytest.raises(TypeError, match="to be a State"):
        state.apply("step")
