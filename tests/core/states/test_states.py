"""State: the mapping, the pytree, and the functions on states."""

import copy
import pickle

import jax
import jax.numpy as jnp
import pytest

from graftree.core import filters
from graftree.core.states import states
from graftree.core.states.flat_states import FlatState
from graftree.core.states.states import State
from graftree.core.variables.kinds import BatchStat, Param


class Special(State):
    """A subclass, registered by itself."""


def example():
    return State({"b": {"d": 1, "c": {"e": 2}}, "a": 3})


# ----------------------------------------------------------------- the mapping


def test_items_and_attributes_are_the_same():
    state = example()
    assert state.b.c.e == state["b"]["c"]["e"] == 2
    state.b.x = 5
    assert state["b"]["x"] == 5
    del state.b.x
    del state["a"]
    assert state == {"b": {"d": 1, "c": {"e": 2}}}


def test_missing_names():
    state = example()
    assert not hasattr(state, "x")
    with pytest.raises(AttributeError, match="No attribute 'x' in State"):
        state.x
    with pytest.raises(AttributeError, match="No attribute 'x' in State"):
        del state.x
    with pytest.raises(KeyError):
        state["x"]


def test_sub_mappings_are_views_of_the_stored_dict():
    state = Special({"a": {"b": 1}})
    view = state["a"]
    assert type(view) is Special and view is not state["a"]
    view["b"] = 2
    assert state.raw_mapping == {"a": {"b": 2}}


def test_stored_states_are_unwrapped():
    inner = State({"x": 1})
    state = State({"a": inner})
    state["b"] = inner
    state.update(c=inner)
    assert all(value is inner.raw_mapping for value in state.raw_mapping.values())


def test_copy_flag():
    mapping = {"a": {"b": 1}}
    assert State(mapping).raw_mapping is not mapping
    assert State(mapping).raw_mapping["a"] is mapping["a"]
    assert State(mapping, _copy=False).raw_mapping is mapping
    with pytest.raises(ValueError, match="Expected a dictionary"):
        State([("a", 1)], _copy=False)


def test_constructor_takes_a_mapping_or_pairs_only():
    assert State([("a", 1)]) == State({"a": 1}) == State(State({"a": 1}))
    with pytest.raises(TypeError):
        State()
    with pytest.raises(TypeError):
        State({}, a=1)


def test_mapping_protocol():
    state = example()
    assert len(state) == 2 and list(state) == ["b", "a"] and "a" in state
    assert isinstance(state.get("b"), State) and state.get("x", 0) == 0
    assert [type(value) for value in state.values()] == [State, int]
    assert state.pop("a") == 3 and state.setdefault("z", 1) == 1
    assert state.popitem()[0] == "b"
    state.clear()
    assert not state


def test_equality_is_that_of_dicts():
    state = example()
    plain = {"a": 3, "b": State({"c": {"e": 2}, "d": 1})}
    assert state == plain == state and state == State(plain)
    assert state != {"a": 3} and state != 3
    with pytest.raises(TypeError):
        hash(state)
    with pytest.raises(ValueError, match="truth value"):
        bool(State({"a": jnp.ones(2)}) == State({"a": jnp.ones(2)}))


def test_union():
    state = example()
    assert state | {} is state
    assert (state | {"b": {"d": 7}}) == {"b": {"d": 7, "c": {"e": 2}}, "a": 3}
    assert ({"a": 0, "z": 1} | state)["a"] == 3
    assert state["b"]["d"] == 1


def test_copies():
    state = example()
    shallow, deep = copy.copy(state), copy.deepcopy(state)
    shallow["n"] = 1
    shallow["b"]["d"] = 7
    assert "n" not in state and state["b"]["d"] == 7 and deep["b"]["d"] == 1
    restored = pickle.loads(pickle.dumps(Special({"a": {"b": 1}})))
    assert type(restored) is Special and restored == {"a": {"b": 1}}


def test_repr():
    assert repr(State({})) == "State({})"
    text = repr(State({"b": {"c": 1, "d": {}}, 0: "x"}))
    assert text == "State({\n  'b': {\n    'c': 1,\n    'd': {}\n  },\n  0: 'x'\n})"


# ------------------------------------------------------------------ the pytree


def test_leaves_are_sorted_with_dict_keys():
    flat, treedef = jax.tree.flatten_with_path(example())
    assert [jax.tree_util.keystr(path) for path, _ in flat] == [
        "['a']",
        "['b']['c']['e']",
        "['b']['d']",
    ]
    assert treedef != jax.tree.structure(example().raw_mapping)
    assert jax.tree.unflatten(treedef, [3, 2, 1]) == example()


def test_values_of_variables_are_reached_and_variables_rebuilt():
    state = State({"linear": {"kernel": Param(jnp.ones(2))}})
    [(path, _)] = jax.tree.leaves_with_path(state)
    assert jax.tree_util.keystr(path) == "['linear']['kernel'].value"
    mapped = jax.tree.map(lambda x: x + 1, state)
    assert type(mapped["linear"]["kernel"]) is Param
    assert mapped.linear.kernel[...].tolist() == [2, 2]
    assert state.linear.kernel[...].tolist() == [1, 1]


def test_subclasses_are_pytrees():
    mapped = jax.tree.map(lambda x: x + 1, Special({"a": {"b": 1}}))
    assert type(mapped) is Special and mapped == {"a": {"b": 2}}


@pytest.mark.parametrize(
    "mapping",
    [{"b": 1, 10: 2, 2: 3}, {"x": {"y": {"b": 1, 10: 2, 2: 3}}}],
    ids=["top", "deep"],
)
def test_keys_of_different_types_can_be_mixed(mapping):
    state = State(mapping)
    assert jax.tree.leaves(state) == [3, 2, 1]
    mapped = jax.tree.map(lambda x: x, state)
    assert mapped == state and mapped.raw_mapping == mapping
    assert states.to_flat_state(state).leaves == [3, 2, 1]


def test_goes_through_jit():
    state = State({"a": {"b": jnp.ones(2)}, "c": jnp.ones(())})
    result = jax.jit(lambda s: s)(state)
    assert isinstance(result, State) and type(result.raw_mapping["a"]) is dict


# --------------------------------------------------------------- the functions


class Wrapper(dict):
    """A stand-in for objects that pair a State with something else."""

    @property
    def raw_mapping(self):
        return {"a": 3, "b": {"d": 1, "c": {"e": 2}}}


MAPPINGS = pytest.mark.parametrize(
    "state", [example(), example().raw_mapping, Wrapper()], ids=["state", "dict", "raw"]
)


@MAPPINGS
def test_every_function_takes_any_mapping(state):
    paths = (("a",), ("b", "c", "e"), ("b", "d"))
    assert states.to_flat_state(state).paths == paths
    assert states.map_state(lambda path, x: path, state)["b"]["d"] == ("b", "d")
    assert states.filter_state(state, filters.PathContains("a")) == {"a": 3}
    assert states.merge_state(state) == example()
    assert states.diff(state, {"b": {"d": 0, "c": {"e": 0}}}) == {"a": 3}


def test_non_mappings_are_refused():
    with pytest.raises(TypeError, match="Expected a State or another mapping"):
        states.to_flat_state([1])


@pytest.mark.parametrize("form", [list, dict, lambda x: FlatState(x, sort=True)])
def test_flat_forms_become_states(form):
    items = [(("b", "c"), 1), (("a",), 2)]
    state = states.from_flat_state(form(items), cls=Special)
    assert type(state) is Special and state == {"b": {"c": 1}, "a": 2}


def test_round_trip_drops_empty_mappings():
    state = State({"a": {"b": {}}, "c": 1})
    assert states.from_flat_state(states.to_flat_state(state)) == {"c": 1}


def test_map_passes_variables_and_keeps_none():
    param = Param(1)
    seen = []
    state = states.map_state(lambda path, x: seen.append(x), State({"a": param}))
    assert seen[0] is param and state == {"a": None}


def test_split_shares_leaves_and_must_cover_all():
    param, stat = Param(1), BatchStat(2)
    state = State({"x": {"p": param}, "s": stat})
    params, rest = states.split_state(state, Param, ...)
    assert params["x"]["p"] is param and list(rest) == ["s"]
    assert isinstance(states.split_state(state, ...), State)
    with pytest.raises(ValueError, match="Non-exhaustive filters, got a non-empty"):
        states.split_state(state, Param)
    with pytest.raises(TypeError):
        states.split_state(state)


def test_filter_may_leave_groups_empty():
    state = State({"p": Param(1)})
    stats, params = states.filter_state(state, BatchStat, Param)
    assert stats == State({}) and list(params) == ["p"]


def test_merge_is_deep_and_the_last_wins():
    merged = states.merge_state({"a": {"b": 1, "c": 2}}, State({"a": {"b": 3}}), {})
    assert type(merged) is State and merged == {"a": {"b": 3, "c": 2}}
    assert states.merge_state({"a": {"b": 1}}, {"a": 2}) == {"a": 2}


def test_merge_changes_none_of_its_arguments():
    first, second = {"a": {"b": 1}}, {"a": {"c": 2}, "e": {}}
    assert states.merge_state(first, second) == {"a": {"b": 1, "c": 2}}
    assert first == {"a": {"b": 1}} and second == {"a": {"c": 2}, "e": {}}


def test_merge_of_one():
    state = example()
    assert states.merge_state(state) is state
    assert type(states.merge_state({"a": 1}, cls=Special)) is Special


def test_merge_refuses_a_mapping_over_a_leaf():
    with pytest.raises(ValueError, match=r"Conflicting entries at path \('a', 'b'\)"):
        states.merge_state({"a": {"b": 1}}, {"a": {"b": {"c": 2}}})


def test_diff_keeps_what_the_other_lacks():
    state = example()
    assert states.diff(state, {}) is state
    assert states.diff(state, State({"a": 0, "b": {"d": 0}})) == {"b": {"c": {"e": 2}}}


OLDER = {
    "nnx.map_state": lambda s: s.map(lambda path, x: x),
    "nnx.to_flat_state": lambda s: s.flat_state().to_nested_state(),
    "nnx.from_flat_state": lambda s: State.from_flat_path(
        dict(states.to_flat_state(s))
    ),
    "nnx.to_pure_dict": lambda s: s.to_pure_dict(),
    "nnx.replace_by_pure_dict": lambda s: s.replace_by_pure_dict({}) or s,
    "nnx.split_state": lambda s: s.split(...),
    "nnx.filter_state": lambda s: s.filter(...),
    "nnx.merge_state": lambda s: State.merge(s, {}),
    "nnx.statelib.diff": lambda s: s - {"z": 1},
}


@pytest.mark.parametrize("function", OLDER)
def test_older_methods_work_and_name_the_function(function):
    with pytest.warns(DeprecationWarning, match=function) as caught:
        result = OLDER[function](example())
    assert result == example()
    assert caught[0].filename == states.__file__  # so not shown by default


# --------------------------------------------------------------------- the peer


@pytest.mark.peers
@pytest.mark.parametrize(
    "expression",
    [
        lambda n, s: n.to_flat_state(s).paths,
        lambda n, s: repr(s),
        lambda n, s: repr(n.to_flat_state(s)),
        lambda n, s: repr(n.map_state(lambda path, x: path, s)),
        lambda n, s: repr(n.merge_state(s, n.State({"a": 7, "n": {"m": 1}, "e": {}}))),
        lambda n, s: repr(n.filter_state(s, int, n.PathContains("b"))),
        lambda n, s: n.to_pure_dict(s),
        lambda n, s: repr(n.statelib.diff(s, n.State({"a": 0, "b": {"d": 0}}))),
        lambda n, s: [repr(x) for x in s.values()],
        lambda n, s: str(jax.tree.structure(s)),
        lambda n, s: n.restore_int_paths({"0": {"1_0": 1, "x": 2}}),
    ],
)
def test_results_equal_those_of_the_peer(expression):
    peer = pytest.importorskip("flax.nnx")
    import graftree as nnx

    mapping = {"b": {"d": 1, "c": {"e": (2, "x")}, "f": {}}, "a": 3}
    assert expression(nnx, nnx.State(mapping)) == expression(peer, peer.State(mapping))
