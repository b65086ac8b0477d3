"""FlatState: a sequence of (path, leaf)."""

import pickle

import jax
import jax.numpy as jnp
import pytest

from graftree.core import filters
from graftree.core.states import flat_states, states
from graftree.core.states.flat_states import FlatState
from graftree.core.variables.kinds import BatchStat, Param

A, B = ("a",), ("b", 0)


def flat(**leaves):
    return FlatState([((name,), leaf) for name, leaf in leaves.items()], sort=True)


def test_is_a_sequence_of_pairs():
    state = FlatState([(B, 2), (A, 1)], sort=True)
    assert state.paths == (A, B) and state.leaves == [1, 2]
    assert len(state) == 2 and list(state) == [(A, 1), (B, 2)]
    assert state[-1] == (B, 2) and dict(state) == {A: 1, B: 2}
    assert isinstance(state[:1], FlatState) and list(state[:1]) == [(A, 1)]


def test_order_is_kept_unless_asked_to_sort():
    assert FlatState([(B, 2), (A, 1)], sort=False).paths == (B, A)
    with pytest.raises(TypeError):
        FlatState([])


def test_different_types_of_keys_are_sorted_numbers_first():
    items = [(("x",), 0), ((10,), 0), ((2,), 0)]
    assert FlatState(items, sort=True).paths == ((2,), (10,), ("x",))


def test_sorted_keys_and_values_are_not_copied():
    keys, values = (A, B), [1, 2]
    state = FlatState.from_sorted_keys_values(keys, values)
    assert state.paths is keys and state.leaves is values
    assert FlatState.from_sorted_keys_values([A], (1,)).paths == (A,)


def test_equality_is_identity():
    state = flat(a=1)
    assert state == state and state != flat(a=1)
    assert len({state, state}) == 1


def test_merge_is_sorted_and_keeps_a_single_one():
    state = flat(a=1)
    assert FlatState.merge(state) is state
    merged = FlatState.merge(flat(c=3, a=1), flat(b=2))
    assert list(merged) == [(("a",), 1), (("b",), 2), (("c",), 3)]


def test_split_gives_each_leaf_to_the_first_match():
    param, stat = Param(1), BatchStat(2)
    state = flat(a=param, b=stat, c=3)
    params, stats, rest = state.split(Param, (Param, BatchStat), ...)
    assert params.leaves == [param] and stats.leaves == [stat] and rest.leaves == [3]
    assert isinstance(state.split(...), FlatState)


def test_split_refuses_to_lose_leaves():
    phrase = "Non-exhaustive filters, got a non-empty remainder"
    with pytest.raises(ValueError, match=phrase) as caught:
        flat(a=1, b=Param(2)).split(int)
    assert "('b',): Param" in str(caught.value) and "`...`" in str(caught.value)


def test_long_remainders_are_cut():
    state = FlatState([((i,), i) for i in range(30)], sort=True)
    with pytest.raises(ValueError, match="and 10 more"):
        state.split(str)


def test_filter_drops_what_matches_nothing():
    state = flat(a=1, b="x", c=None)
    assert state.filter(int).leaves == [1]
    assert [group.leaves for group in state.filter(int, str)] == [[1], ["x"]]


def test_one_filter_is_needed_and_rest_comes_last():
    with pytest.raises(TypeError):
        flat(a=1).split()
    with pytest.raises(ValueError, match="can only be used as the last"):
        flat(a=1).filter(..., int)


def test_nested_state():
    nested = FlatState([(B, 2), (A, 1)], sort=True).to_nested_state()
    assert isinstance(nested, states.State) and nested == {"a": 1, "b": {0: 2}}


def test_is_a_pytree_of_its_leaves():
    state = flat(a=jnp.ones(2), b=jnp.ones(3))
    doubled = jax.jit(lambda s: jax.tree.map(lambda x: 2 * x, s))(state)
    assert isinstance(doubled, FlatState) and doubled.paths == state.paths
    assert [x.sum() for x in doubled.leaves] == [4, 6]


def test_survives_pickling():
    restored = pickle.loads(pickle.dumps(flat(a=1)))
    assert list(restored) == [(("a",), 1)]


def test_repr_lists_the_pairs():
    assert repr(flat(a=1)) == "FlatState([\n  (('a',), 1)\n])"
    assert repr(flat()) == "FlatState([])"


def test_paths_are_grouped_by_value():
    state = states.State({"a": Param(1), "b": 1, "c": {"d": None}})
    assert flat_states.create_path_filters(state) == {
        filters.PathIn(("a",), ("b",)): 1,
        filters.PathIn(("c", "d")): None,
    }
