"""List and Dict: Python's lists and dicts, with statuses, paths and an order.

A Dict keeps the order of its caller; what is made of it is sorted, and a loop in a
function in which it has another order is told.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

import graftree as nnx
from tests import tables, zoo


def statuses(items):
    """The values of a List and whether each is data."""
    table = vars(items)["_pytree__nodes"]
    return [(value, table[str(i)]) for i, value in enumerate(items)]


@pytest.fixture
def mixed():
    return nnx.List([nnx.data(1), nnx.static("b"), 3])


# --------------------------------------------------------------------------------- List


# Each in Python's way: the list that it leaves, and what it gives.
@tables.cases(
    "change",
    lambda x: x.append(9),
    lambda x: x.insert(1, 9),
    lambda x: x.insert(-1, 9),
    lambda x: x.insert(100, 9),
    lambda x: x.insert(-100, 9),
    lambda x: x.extend([7, 8]),
    lambda x: x.extend(iter("xy")),
    lambda x: x.extend(x),
    lambda x: x.__iadd__([7, 8]),
    lambda x: x.pop(),
    lambda x: x.pop(0),
    lambda x: x.pop(-2),
    lambda x: x.remove(2),
    lambda x: x.reverse(),
    lambda x: x.clear(),
    lambda x: x.__setitem__(-1, 30),
    lambda x: x.__setitem__(slice(0, 2), (10, 20)),
    lambda x: x.__delitem__(1),
    lambda x: x.__delitem__(slice(0, 2)),
    lambda x: x.__delitem__(slice(1, 9)),
    lambda x: x.__delitem__(slice(None, None, 2)),
    lambda x: (x[0], x[-1], x[np.int64(1)]),
    lambda x: (x[1:], x[:], x[9:], x[None:None:-2]),
    lambda x: (x.index(2), x.index(2, 2, 4), x.count(2)),
    lambda x: (2 in x, "a" in x, bool(x), list(reversed(x))),
)
def test_lists_behave_as_lists(change):
    mine, python = nnx.List([1, 2, 3, 2]), [1, 2, 3, 2]
    a, b = change(mine), change(python)
    assert list(mine) == python and len(mine) == len(python)
    assert a is mine if b is python else a == b


def test_lists_are_made_of_one_iterable_or_none():
    assert list(nnx.List()) == [] and list(nnx.List(range(3))) == [0, 1, 2]
    with pytest.raises(TypeError):
        nnx.List(3)


@tables.cases(
    "index, error, message",
    *((index, IndexError, "out of bounds") for index in (4, -5)),
    *((x, TypeError, "Invalid index type") for x in ("0", 1.0, None, (0,))),
)
def test_an_index_that_is_none_is_an_error(index, error, message):
    for access in (
        lambda items: items[index],
        lambda items: items.__setitem__(index, 0),
        lambda items: items.__delitem__(index),
        *((lambda items: items.pop(index),) if error is IndexError else ()),
    ):
        with pytest.raises(error, match=message):
            access(nnx.List("abcd"))
    with pytest.raises(IndexError):
        nnx.List().pop()


def test_every_item_has_a_status_of_its_own():
    items = nnx.List([nnx.data(1), nnx.static("a"), jnp.ones(1), nnx.data([1])])
    assert [is_data for _, is_data in statuses(items)] == [True, False, True, True]


@tables.cases(
    "change, error, message",
    (lambda x: x.append([np.ones(2)]), ValueError, "Found data on value of type"),
    (lambda x: x.extend([3, [np.ones(1)]]), ValueError, "Found data"),
    (lambda x: x.insert(0, [np.ones(1)]), ValueError, "Found data"),
    (lambda x: x.__setitem__(slice(2), [9, [np.ones(2)]]), ValueError, "Found data"),
    (lambda x: x.__setitem__(slice(1, 3), "x"), ValueError, "Length mismatch"),
    (lambda x: x.__setitem__(slice(1, 3), 1), TypeError, "Expected an iterable"),
)
def test_a_refused_change_leaves_the_list_as_it_was(mixed, change, error, message):
    before = statuses(mixed)
    with pytest.raises(error, match=message):
        change(mixed)
    assert statuses(mixed) == before
    with pytest.raises(ValueError, match="Found data on value of type"):
        nnx.List([[np.ones(1)]])


def list_of(x):
    return nnx.List([np.full(2, x), nnx.Param(np.full(2, x)), nnx.List([x]), "a"])


def test_lists_are_equal_element_by_element_and_hashed_by_identity():
    assert list_of(1) == list_of(1) != list_of(2)
    assert nnx.List([np.ones(2)]) != nnx.List([np.ones(3)])
    assert nnx.List([1, "a"]) == [1, "a"] and nnx.List([1]) != (1,)
    assert nnx.List([1]) != nnx.List([1, 1])
    assert len({list_of(1), list_of(1)}) == 2


def test_arrays_and_variables_are_found_by_value():
    items = list_of(1.0)
    assert items.index("a") == 3 and items.count(np.ones(2)) == 2
    assert nnx.Param(np.ones(2)) in items
    items.remove("a")
    with pytest.raises(ValueError, match="not in this List"):
        items.remove("a")


def test_list_item_keeps_its_status_when_it_is_set(mixed):
    mixed[0] = 10
    mixed[-1] = 30
    assert statuses(mixed) == [(10, True), ("b", False), (30, False)]
    with pytest.raises(ValueError, match="Cannot assign data value of type"):
        mixed[1] = np.ones(2)
    items = nnx.List([np.ones(2), "a"])
    items.insert(5, items.pop(0))
    assert items[0] == "a" and len(jax.tree.leaves(items)) == 1


def test_list_attribute_named_by_an_index_is_an_item():
    items = nnx.List("ab")
    setattr(items, "1", "x")
    setattr(items, "7", "y")
    assert items == ["a", "x", "y"]
    delattr(items, "0")
    assert items == ["x", "y"]
    items.clear()
    assert set(vars(items)) == {"_length", "_pytree__nodes", "_pytree__state"}
    assert vars(items)["_length"] == 0


def test_items_are_attributes_named_by_their_index():
    items = nnx.List([nnx.Param(1), "x"])
    assert isinstance(vars(items)["0"], nnx.Param) and vars(items)["1"] == "x"
    assert items._length == 2 and isinstance(items, nnx.Module)


def test_paths_have_integers_in_numeric_order():
    items = nnx.List([nnx.Param(i) for i in range(12)])
    assert list(nnx.state(items)) == list(range(12))
    keys = [path[0] for path, _ in jax.tree_util.tree_flatten_with_path(items)[0]]
    assert keys == [jax.tree_util.SequenceKey(i) for i in range(12)]


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
    assert statuses(items) == [("d", True), ("new", False)]


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


# --------------------------------------------------------------------------------- Dict


@tables.cases(
    "access",
    lambda d: d["z"],
    lambda d: d.pop("z"),
    lambda d: d.__delitem__("z"),
    lambda d: nnx.Dict().popitem(),
)
def test_a_missing_key_is_a_key_error(access):
    with pytest.raises(KeyError):
        access(nnx.Dict(a=1))
    with pytest.raises(AttributeError):
        nnx.Dict().z
    assert nnx.Dict().pop("z", 0) == 0 and nnx.Dict().get("z") is None


@pytest.mark.parametrize("other", [{"b": 1, "a": 2}, {"a": 2}, {"a": 1, "c": 1}, {}, 1])
def test_dicts_are_equal_as_mappings_and_hashed_by_identity(other):
    mine, is_equal = nnx.Dict(a=2, b=1), other == {"a": 2, "b": 1}
    assert (mine == other) is is_equal
    if isinstance(other, dict):
        assert (nnx.Dict(other) == mine) is is_equal
    assert mine != [("a", 2), ("b", 1)]
    assert len({mine, nnx.Dict(a=2, b=1)}) == 2


def test_dicts_of_arrays_are_compared_by_value():
    def make(x):
        return nnx.Dict(a=np.full(2, x), b=nnx.Param(np.full(2, x)), c=x)

    assert make(1) == make(1) != make(2)


@pytest.mark.parametrize("key", ["items", "sow", "attribute_key", "@a", "@items"])
def test_keys_may_be_names_of_methods(key):
    items = nnx.Dict()
    assert key not in items
    items[key] = nnx.Param(np.ones(2))
    assert list(items) == [key] and key in items and len(items) == 1
    assert list(items.items()) == [(key, items[key])] and callable(items.items)
    assert list(nnx.state(items)) == [key]
    assert list(nnx.merge(*nnx.split(items)).keys()) == [key]
    del items[key]
    assert not items and key not in items
    items.keys = 3
    assert items["keys"] == 3 and list(items.keys()) == ["keys"]


def test_items_and_attributes_are_the_same():
    d = nnx.Dict({"a": 1}, b=nnx.Param(2))
    assert d["a"] == d.a == 1 and d.b is d["b"]
    d.c = 3
    d["a"] = 4
    assert d["c"] == 3 and d.a == 4
    assert nnx.Dict([("a", 1)])["a"] == 1 and isinstance(d, nnx.Module)


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


@pytest.mark.parametrize("key", [1, ("a",), None])
def test_keys_are_strings(key):
    with pytest.raises(TypeError, match="Expected a string as the key of a Dict"):
        nnx.Dict({key: 1})
    with pytest.raises(TypeError, match="Expected a string as the key of a Dict"):
        nnx.Dict()[key] = 1
    assert key not in nnx.Dict()


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
def test_dict_keeps_its_bookkeeping_to_itself_and_refuses_hidden_arrays(key):
    items = nnx.Dict(a=1)
    assert key not in items and items.get(key) is None
    with pytest.raises(ValueError, match="is reserved by Dict"):
        items[key] = 1
    with pytest.raises(ValueError, match="Found data on value of type"):
        items["b"] = [np.ones(2)]
    assert list(items) == ["a"]


def test_names_of_methods_are_sorted_and_shown_as_keys():
    items = nnx.Dict(z=np.ones(1), items=np.ones(2), a=np.ones(3))
    assert list(nnx.merge(*nnx.split(items))) == ["a", "items", "z"]
    assert [leaf.size for leaf in jax.tree.leaves(items)] == [3, 2, 1]
    assert repr(nnx.Dict(a=1, items=2)) == "Dict({\n  'a': 1,\n  'items': 2\n})"


# ------------------------------------------------------------------ the order of a Dict


ORDERS = st.permutations("abcd")


def made(order):
    return nnx.Dict({key: nnx.Param(jnp.array(float(ord(key)))) for key in order})


def net_of(order):
    return zoo.Box(layers=made(order))


def with_new_item(net):
    net.layers.aa = nnx.Param(jnp.ones(()))


def without_an_item(net):
    del net.layers.b


def with_other_items(net):
    without_an_item(net)
    with_new_item(net)
    net.layers.b = nnx.Param(jnp.zeros(2))


READERS = {
    "split": nnx.split,
    "state": nnx.state,
    "clone": nnx.clone,
    "tree.map": lambda net: jax.tree.map(lambda x: x, net),
    "jit": nnx.jit(lambda net: None),
    "grad": nnx.grad(lambda net: net.layers.a[...]),
    "update": lambda net: nnx.update(net, nnx.state(made("dcba"))),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@given(order=ORDERS)
def test_the_dict_of_the_caller_keeps_its_order(read, order):
    net = net_of(order)
    if read is not READERS["update"]:
        read(net)
        read(net)
    assert [*net.layers] == [*vars(net.layers)][2:] == order


@pytest.mark.parametrize("change", [with_new_item, without_an_item, with_other_items])
@given(order=ORDERS)
def test_also_when_a_function_changes_its_items(change, order):
    expected, net = net_of(order), net_of(order)
    change(expected)
    nnx.jit(change)(net)
    assert [*net.layers] == [*expected.layers]


@given(order=ORDERS)
def test_what_is_made_of_it_is_sorted(order):
    net = net_of(order)
    for other in (
        nnx.clone(net),
        nnx.merge(*nnx.split(net)),
        jax.tree.map(lambda x: x, net),
        jax.jit(lambda net: net)(net),
    ):
        assert [*other.layers] == sorted(order)
    assert nnx.graphdef(net) == nnx.graphdef(net_of("abcd"))
    assert jax.tree.structure(net) == jax.tree.structure(net_of("abcd"))


WAYS = {
    "jit": lambda f, mode: nnx.jit(f, **mode),
    "nested": lambda f, mode: nnx.jit(nnx.value_and_grad(f, **mode), **mode),
    "jax.jit": lambda f, _: jax.jit(f),
    "functional": lambda f, _: (
        lambda net: jax.jit(lambda graphdef, state: f(nnx.merge(graphdef, state)))(
            *nnx.split(net)
        )
    ),
}
LOOPS = {
    "keys": lambda d: [d[key][...] for key in d],
    "values": lambda d: [x[...] for x in d.values()],
    "items": lambda d: [x[...] for _, x in d.items()],
    "dict": lambda d: [x[...] for x in dict(d).values()],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("order", ["abcd", "dbca"])
def test_a_loop_in_another_order_is_told(way, order, mode):
    for loop in LOOPS.values():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            WAYS[way](lambda net, loop=loop: sum(loop(net.layers)), mode)(net_of(order))
        assert bool(caught) is (order == "dbca")
        for warning in caught:
            assert warning.category is nnx.errors.OrderWarning
            assert "here: a, b, c, d\n  as inserted: d, b, c, a" in str(warning.message)
            assert warning.filename == __file__


def test_new_items_of_a_dict_that_is_sorted_come_last_and_are_told():
    def add(net):
        with_new_item(net)
        return sum(x[...] for x in net.layers.values())

    with pytest.warns(nnx.errors.OrderWarning, match="here: a, b, aa"):
        nnx.jit(add)(net_of("ba"))
    nnx.jit(add)(net_of("ab"))


def test_dicts_made_in_the_function_are_in_order():
    nnx.jit(lambda: [*made("ba")] == ["b", "a"] and jnp.ones(()))()


ORDERLESS = {
    "len": len,
    "in": lambda d: "a" in d,
    "item": lambda d: d["a"],
    "attribute": lambda d: d.a,
    "get": lambda d: d.get("z"),
    "equal": lambda d: d == nnx.clone(d),
    "set": lambda d: d.update(a=1.0),
    "repr": repr,
    "tree": jax.tree.leaves,
    "state": nnx.state,
    "modules": lambda d: [*nnx.iter_graph(d)],
}


@pytest.mark.parametrize("use", ORDERLESS.values(), ids=ORDERLESS)
def test_what_does_not_depend_on_the_order_is_no_matter(use):
    nnx.jit(lambda d: (use(d), None)[1])(made("dbca"))
