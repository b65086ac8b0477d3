"""Keys and paths: order, conversion from JAX, printing."""

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftree.core import paths

KEYS = st.integers() | st.text() | st.tuples(st.integers() | st.text())


class Unordered:
    pass


@given(st.lists(KEYS))
def test_any_keys_can_be_ordered_and_numbers_come_first(keys):
    ordered = paths.sorted_keys(keys)
    assert sorted(map(repr, ordered)) == sorted(map(repr, keys))
    kinds = [type(key) for key in ordered]
    assert kinds == sorted(kinds, key=[int, str, tuple].index)


@given(st.lists(st.lists(KEYS).map(tuple), unique=True))
def test_order_of_paths_is_that_of_their_keys(some):
    ordered = [path for path, _ in paths.sorted_by_path([(p, None) for p in some])]
    assert ordered == sorted(some, key=paths.path_sort_key)


@given(st.lists(st.integers()) | st.lists(st.text()))
def test_keys_of_one_type_have_the_order_of_python(keys):
    assert paths.sorted_keys(keys) == sorted(keys) == sorted(keys, key=paths.sort_key)


def test_integers_are_ordered_by_value():
    assert paths.sorted_items({10: "b", 2: "a", "x": "c"}) == [
        (2, "a"),
        (10, "b"),
        ("x", "c"),
    ]


def test_none_can_be_a_key_among_others():
    assert paths.sorted_keys(["a", None, 1]) == [1, "a", None]


def test_equal_paths_keep_their_order():
    items = [(("a",), 2), ((0,), 3), (("a",), 1)]
    assert paths.sorted_by_path(items) == [((0,), 3), (("a",), 2), (("a",), 1)]


def test_jax_entries_become_keys():
    class Entry:
        def __str__(self):
            return "other"

    entries = (
        jax.tree_util.GetAttrKey("a"),
        jax.tree_util.SequenceKey(1),
        jax.tree_util.DictKey((1, "b")),
        jax.tree_util.FlattenedIndexKey(2),
        Entry(),
    )
    assert paths.from_jax(entries) == ("a", 1, (1, "b"), 2, "other")


@pytest.mark.parametrize("key", [[1], Unordered()], ids=["unhashable", "unordered"])
def test_invalid_keys_are_refused(key):
    with pytest.raises(ValueError, match="Invalid key"):
        paths.from_jax((jax.tree_util.DictKey(key),))


def test_paths_are_printed_with_slashes():
    assert paths.to_string(("a", 0, "b")) == "a/0/b"
    assert paths.to_string(()) == ""
    assert paths.to_string((), root="<root>") == "<root>"


def test_jax_paths_are_printed_as_expressions():
    [(path, _)] = jax.tree.leaves_with_path({"a": [1.0]})
    assert paths.keystr(path) == "['a'][0]"
