"""List and Dict: items as attributes, each with its own status."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx


def statuses(items):
    """The values of a List and whether each is data."""
    table = vars(items)["_pytree__nodes"]
    return [(value, table[str(i)]) for i, value in enumerate(items)]


@pytest.fixture
def mixed():
    return nnx.List([nnx.data(1), nnx.static("b"), 3])


# ------------------------------------------------------------------------ List: items


def test_list_keeps_items_as_attributes_with_a_static_length(mixed):
    entries = vars(mixed)
    assert (entries["0"], entries["1"], entries["2"]) == (1, "b", 3)
    assert entries["_length"] == 3
    assert dict(entries["_pytree__nodes"]) == {
        "0": True,
        "1": False,
        "2": False,
        "_length": False,
    }


def test_list_takes_one_iterable_or_none():
    assert len(nnx.List()) == 0
    assert list(nnx.List(range(3))) == [0, 1, 2]
    with pytest.raises(TypeError):
        nnx.List(3)


def test_list_items_have_integer_keys_in_numeric_order():
    items = nnx.List(nnx.Param(jnp.array(i)) for i in range(12))
    assert list(nnx.state(items)) == list(range(12))
    keyed, _ = jax.tree_util.tree_flatten_with_path(items)
    assert [path[0].idx for path, _ in keyed] == list(range(12))
    assert [leaf.item() for leaf in jax.tree.leaves(items)] == list(range(12))


def test_list_item_that_hides_arrays_is_refused():
    with pytest.raises(ValueError, match="Found data on value of type"):
        nnx.List([[jnp.ones(2)]])
    assert len(jax.tree.leaves(nnx.List([nnx.data([jnp.ones(2)])]))) == 1


def test_list_survives_split_and_merge(mixed):
    mixed.append(nnx.Param(jnp.ones(2)))
    merged = nnx.merge(*nnx.split(mixed))
    assert type(merged) is nnx.List
    assert list(merged)[:3] == [1, "b", 3]
    assert statuses(merged)[:3] == statuses(mixed)[:3]


def test_list_can_be_the_carry_of_a_loop():
    def body(_, items):
        items[0] += 1
        return items

    assert jax.lax.fori_loop(0, 3, body, nnx.List([jnp.array(0), "s"]))[0] == 3


def test_list_shows_its_items():
    assert repr(nnx.List([1, "a"])) == "List([\n  1,\n  'a'\n])"


# ---------------------------------------------------------------------- List: reading


def test_list_reads_like_a_list():
    items, expected = nnx.List("abcd"), list("abcd")
    assert [items[i] for i in (0, 3, -1, -4)] == ["a", "d", "d", "a"]
    assert items[np.int64(1)] == "b"
    for part in (slice(None), slice(1, 3), slice(None, None, -2), slice(9, None)):
        assert items[part] == expected[part]
    assert list(reversed(items)) == expected[::-1]
    assert "c" in items and "z" not in items
    assert items.index("c") == 2 and items.index("c", 1, 3) == 2
    assert items.count("a") == 1


@pytest.mark.parametrize("index", [4, -5])
def test_list_index_out_of_bounds_is_an_index_error(index):
    items = nnx.List("abcd")
    for access in (
        lambda: items[index],
        lambda: items.__setitem__(index, 0),
        lambda: items.__delitem__(index),
        lambda: items.pop(index),
    ):
        with pytest.raises(IndexError, match="out of bounds"):
            access()
    with pytest.raises(IndexError):
        nnx.List().pop()


@pytest.mark.parametrize("index", ["0", 1.0, None, (0,)])
def test_list_index_of_another_type_is_a_type_error(index):
    items = nnx.List("ab")
    for access in (
        lambda: items[index],
        lambda: items.__setitem__(index, 0),
        lambda: items.__delitem__(index),
    ):
        with pytest.raises(TypeError, match="Invalid index type"):
            access()


def test_list_searches_arrays_and_variables_by_value():
    items = nnx.List([jnp.ones(2), nnx.Param(jnp.zeros(3)), "a"])
    assert items.index("a") == 2
    assert items.count(jnp.ones(2)) == 1
    assert nnx.Param(jnp.zeros(3)) in items
    items.remove("a")
    with pytest.raises(ValueError, match="not in this List"):
        items.remove("a")


def test_list_is_true_unless_it_is_empty():
    assert nnx.List([0]) and not nnx.List()


# ------------------------------------------------------------- List: equality and hash


def test_lists_are_equal_if_their_items_are():
    assert nnx.List([1, "a"]) == nnx.List([1, "a"]) == [1, "a"]
    assert nnx.List([1]) != nnx.List([2])
    assert nnx.List([1]) != nnx.List([1, 1])
    assert nnx.List([1]) != (1,)


def test_lists_of_arrays_compare_by_value():
    def make(x):
        return nnx.List([jnp.full(2, x), nnx.Param(jnp.full(2, x)), nnx.List([x])])

    assert make(1) == make(1) and make(1) != make(2)
    assert nnx.List([jnp.ones(2)]) != nnx.List([jnp.ones(3)])


def test_lists_hash_by_identity():
    a, b = nnx.List([1]), nnx.List([1])
    assert len({a, b}) == 2 and a in {a}


# ---------------------------------------------------------------------- List: writing


def test_list_item_keeps_its_status_when_it_is_set(mixed):
    mixed[0] = 10
    mixed[-1] = 30
    assert statuses(mixed) == [(10, True), ("b", False), (30, False)]
    with pytest.raises(ValueError, match="Cannot assign data value of type"):
        mixed[1] = jnp.ones(2)


def test_list_moves_items_with_their_status(mixed):
    mixed.insert(0, "new")
    assert statuses(mixed) == [("new", False), (1, True), ("b", False), (3, False)]
    mixed.reverse()
    assert statuses(mixed) == [(3, False), ("b", False), (1, True), ("new", False)]
    assert mixed.pop(0) == 3
    assert statuses(mixed) == [("b", False), (1, True), ("new", False)]
    del mixed[::2]
    assert statuses(mixed) == [(1, True)]


def test_list_swaps_an_array_and_a_static_value_by_moving():
    items = nnx.List([jnp.ones(2), "a"])
    items.insert(5, items.pop(0))
    assert items[0] == "a" and len(jax.tree.leaves(items)) == 1


@pytest.mark.parametrize("index", [-9, -2, -1, 0, 1, 3, 9])
def test_list_inserts_where_a_list_does(index):
    items, expected = nnx.List("abc"), list("abc")
    items.insert(index, "x")
    expected.insert(index, "x")
    assert items == expected


def test_list_grows_and_shrinks_like_a_list():
    items = nnx.List([1])
    items.append(2)
    items.extend(iter([3, 4]))
    items += [5]
    items.extend(items)
    assert items == [1, 2, 3, 4, 5] * 2
    del items[1:9]
    assert items == [1, 5]
    items.clear()
    assert items == [] and vars(items)["_length"] == 0
    assert set(vars(items)) == {"_length", "_pytree__nodes", "_pytree__state"}


def test_list_slice_assignment_needs_equal_length():
    items = nnx.List("abcd")
    items[1:3] = "xy"
    assert items == list("axyd")
    with pytest.raises(ValueError, match="Length mismatch"):
        items[1:3] = "x"
    with pytest.raises(TypeError, match="Expected an iterable"):
        items[1:3] = 1


def test_refused_change_of_a_list_leaves_it_as_it_was(mixed):
    bad = [jnp.ones(2)]
    before = statuses(mixed)
    for change in (
        lambda: mixed.append(bad),
        lambda: mixed.insert(0, bad),
        lambda: mixed.extend([4, bad]),
        lambda: mixed.__setitem__(slice(0, 2), [9, jnp.ones(2)]),
    ):
        with pytest.raises(ValueError):
            change()
        assert statuses(mixed) == before and len(mixed) == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.append(1),
        lambda x: x.insert(0, 1),
        lambda x: x.extend([1]),
        lambda x: x.pop(),
        lambda x: x.reverse(),
        lambda x: x.clear(),
        lambda x: x.__setitem__(0, 1),
        lambda x: x.__setitem__(slice(0, 1), [1]),
        lambda x: x.__delitem__(0),
    ],
)
def test_list_of_an_outer_trace_can_not_be_changed(change, mixed):
    before = statuses(mixed)
    with pytest.raises(nnx.errors.TraceContextError, match="Cannot mutate 'List'"):
        jax.jit(lambda: change(mixed))()
    assert statuses(mixed) == before


def test_list_attribute_named_by_an_index_is_an_item():
    items = nnx.List("ab")
    setattr(items, "1", "x")
    setattr(items, "7", "y")
    assert items == ["a", "x", "y"]
    delattr(items, "0")
    assert items == ["x", "y"]


def test_update_sets_items_in_place_and_adds_further_ones():
    items = nnx.List([nnx.Param(jnp.zeros(2))])
    param = items[0]
    nnx.update(items, {0: nnx.Param(jnp.ones(2)), 1: nnx.Param(jnp.ones(3))})
    assert items[0] is param and len(items) == 2
    np.testing.assert_array_equal(param[...], [1, 1])


# ------------------------------------------------------------------------------- Dict


def test_dict_items_are_attributes():
    items = nnx.Dict({"a": 1}, b=jnp.ones(2))
    items["c"] = nnx.Param(jnp.zeros(1))
    items.d = 4
    assert items.a == items["a"] == 1 and items["d"] == 4
    assert list(items) == ["a", "b", "c", "d"] and len(items) == 4
    assert list(nnx.state(items)) == ["b", "c"]


def test_dict_works_like_a_dict():
    items = nnx.Dict(a=1, b=2)
    assert items.get("z") is None and items.get("a") == 1
    assert items.setdefault("c", 3) == 3 and items.pop("c") == 3
    assert items.pop("z", 0) == 0
    items.update(a=10, d=4)
    assert dict(items) == {"a": 10, "b": 2, "d": 4}
    assert list(items.items()) == [("a", 10), ("b", 2), ("d", 4)]
    del items["a"]
    assert list(items.keys()) == ["b", "d"] and list(items.values()) == [2, 4]
    items.clear()
    assert not items and len(items) == 0


def test_dict_without_a_key_raises_key_error():
    items = nnx.Dict(a=1)
    for access in (
        lambda: items["z"],
        lambda: items.pop("z"),
        lambda: items.__delitem__("z"),
        lambda: nnx.Dict().popitem(),
    ):
        with pytest.raises(KeyError):
            access()
    with pytest.raises(AttributeError):
        items.z


@pytest.mark.parametrize("key", [1, None, ("a",)])
def test_dict_keys_must_be_strings(key):
    with pytest.raises(TypeError, match="Expected a string as the key of a Dict"):
        nnx.Dict({key: 1})
    with pytest.raises(TypeError, match="Expected a string as the key of a Dict"):
        nnx.Dict()[key] = 1
    assert key not in nnx.Dict()


@pytest.mark.parametrize("key", ["items", "sow", "attribute_key", "@a", "@items"])
def test_dict_key_may_be_the_name_of_a_method(key):
    items = nnx.Dict()
    assert key not in items
    items[key] = nnx.Param(jnp.ones(2))
    assert list(items) == [key] and key in items and len(items) == 1
    assert list(items.items()) == [(key, items[key])]
    assert list(nnx.state(items)) == [key]
    merged = nnx.merge(*nnx.split(items))
    assert list(merged.keys()) == [key]
    del items[key]
    assert not items


def test_dict_attribute_with_the_name_of_a_method_is_an_item():
    items = nnx.Dict()
    items.keys = 3
    assert items["keys"] == 3 and list(items.keys()) == ["keys"]


def test_dict_leaves_properties_of_subclasses_alone():
    class Scaled(nnx.Dict):
        @property
        def scale(self):
            return self["factor"]

        @scale.setter
        def scale(self, value):
            self["factor"] = value

    items = Scaled(factor=1)
    items.scale = 2
    items["scale"] = 3
    assert dict(items) == {"factor": 2, "scale": 3} and items.scale == 2


@pytest.mark.parametrize("key", ["__captures__", "_pytree__nodes", "_pytree__state"])
def test_dict_keeps_its_bookkeeping_to_itself(key):
    items = nnx.Dict(a=1)
    assert key not in items and items.get(key) is None
    with pytest.raises(ValueError, match="is reserved by Dict"):
        items[key] = 1
    assert list(items) == ["a"]


def test_dicts_compare_as_mappings():
    def make(x):
        return nnx.Dict(a=jnp.full(2, x), b=nnx.Param(jnp.full(2, x)), c=x)

    assert make(1) == make(1) and make(1) != make(2)
    assert nnx.Dict(a=1) == {"a": 1} and nnx.Dict(a=1) != {"b": 1}
    assert nnx.Dict(a=1) != [("a", 1)]


def test_dicts_hash_by_identity():
    assert len({nnx.Dict(a=1), nnx.Dict(a=1)}) == 2


def test_dict_order_is_sorted_after_a_round_trip():
    items = nnx.Dict(z=jnp.ones(1), items=jnp.ones(2), a=jnp.ones(3))
    assert list(items) == ["z", "items", "a"]
    assert list(nnx.merge(*nnx.split(items))) == ["a", "items", "z"]
    assert [leaf.size for leaf in jax.tree.leaves(items)] == [3, 2, 1]


def test_dict_shows_its_items():
    assert repr(nnx.Dict(a=1, items=2)) == "Dict({\n  'a': 1,\n  'items': 2\n})"


def test_dict_item_that_hides_arrays_is_refused():
    items = nnx.Dict()
    with pytest.raises(ValueError, match="Found data on value of type"):
        items["a"] = [jnp.ones(2)]
    assert not items
