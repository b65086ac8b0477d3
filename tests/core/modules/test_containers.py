"""Corners of List and Dict, of attributes, views and conversions of Modules."""

import sys
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


# ------------------------------------------------------------------------------- List


@tables.cases(
    "use",
    lambda x: x[np.int64(1)],
    lambda x: x[None:None:-2],
    lambda x: x[9:],
    lambda x: x.index("c", 1, 3),
    lambda x: x.extend(x),
    lambda x: x.extend(iter("xy")),
    lambda x: x.__delitem__(slice(1, 9)),
)
def test_lists_behave_as_lists(use):
    items, expected = nnx.List("abcd"), list("abcd")
    assert use(items) == use(expected) and items == expected


def test_lists_are_made_of_one_iterable_or_none():
    assert list(nnx.List()) == [] and list(nnx.List(range(3))) == [0, 1, 2]
    with pytest.raises(TypeError):
        nnx.List(3)


INDEXED = [
    lambda items, i: items[i],
    lambda items, i: items.__setitem__(i, 0),
    lambda items, i: items.__delitem__(i),
]


@pytest.mark.parametrize("index", [4, -5])
@pytest.mark.parametrize("access", [*INDEXED, nnx.List.pop])
def test_list_index_out_of_bounds_is_an_index_error(access, index):
    with pytest.raises(IndexError, match="out of bounds"):
        access(nnx.List("abcd"), index)
    with pytest.raises(IndexError):
        nnx.List().pop()


@pytest.mark.parametrize("index", ["0", 1.0, None, (0,)])
@pytest.mark.parametrize("access", INDEXED)
def test_list_index_of_another_type_is_a_type_error(access, index):
    with pytest.raises(TypeError, match="Invalid index type"):
        access(nnx.List("ab"), index)


def test_arrays_and_variables_are_compared_by_value():
    def make(x):
        return nnx.List([np.full(2, x), nnx.Param(np.full(2, x)), nnx.List([x])])

    assert make(1) == make(1) and make(1) != make(2)
    assert nnx.List([np.ones(2)]) != nnx.List([np.ones(3)])
    assert nnx.List([1, "a"]) == [1, "a"] and nnx.List([1]) != (1,)
    items = nnx.List([np.ones(2), nnx.Param(np.zeros(3)), "a"])
    assert items.index("a") == 2 and items.count(np.ones(2)) == 1
    assert nnx.Param(np.zeros(3)) in items
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


def test_refused_change_of_a_list_leaves_it_as_it_was(mixed):
    before = statuses(mixed)
    for change, error, phrase in (
        (lambda: mixed.append([np.ones(2)]), ValueError, "Found data"),
        (lambda: mixed.__setitem__(slice(2), [9, np.ones(2)]), ValueError, "data"),
        (lambda: mixed.__setitem__(slice(1, 3), "x"), ValueError, "Length mismatch"),
        (lambda: mixed.__setitem__(slice(1, 3), 1), TypeError, "Expected an iterable"),
    ):
        with pytest.raises(error, match=phrase):
            change()
        assert statuses(mixed) == before


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


# ------------------------------------------------------------------------------- Dict


@tables.cases(
    "access",
    lambda d: d.pop("z"),
    lambda d: d.__delitem__("z"),
    lambda d: nnx.Dict().popitem(),
)
def test_dict_without_a_key_raises_key_error(access):
    with pytest.raises(KeyError):
        access(nnx.Dict(a=1))
    assert nnx.Dict().pop("z", 0) == 0 and nnx.Dict().get("z") is None


@pytest.mark.parametrize("key", ["items", "sow", "attribute_key", "@a", "@items"])
def test_dict_key_may_be_the_name_of_a_method(key):
    items = nnx.Dict()
    assert key not in items
    items[key] = nnx.Param(np.ones(2))
    assert list(items) == [key] and key in items and len(items) == 1
    assert list(items.items()) == [(key, items[key])]
    assert list(nnx.state(items)) == [key]
    assert list(nnx.merge(*nnx.split(items)).keys()) == [key]
    del items[key]
    assert not items
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
def test_dict_keeps_its_bookkeeping_to_itself_and_refuses_hidden_arrays(key):
    items = nnx.Dict(a=1)
    assert key not in items and items.get(key) is None
    with pytest.raises(ValueError, match="is reserved by Dict"):
        items[key] = 1
    with pytest.raises(ValueError, match="Found data on value of type"):
        items["b"] = [np.ones(2)]
    assert list(items) == ["a"]


def test_dicts_of_arrays_compare_by_value():
    def make(x):
        return nnx.Dict(a=np.full(2, x), b=nnx.Param(np.full(2, x)), c=x)

    assert make(1) == make(1) and make(1) != make(2)
    assert nnx.Dict(a=1) != {"b": 1} and nnx.Dict(a=1) != [("a", 1)]


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
    "grad": lambda f, mode: nnx.value_and_grad(f, **mode),
    "vmap": lambda f, mode: nnx.vmap(f, in_axes=None, axis_size=2, **mode),
    "remat": lambda f, mode: nnx.remat(f, **mode),
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


@pytest.mark.parametrize("other", [{"b": 1, "a": 2}, {"a": 2}, {"a": 1, "c": 1}, {}, 1])
def test_equality_is_that_of_mappings(other):
    assert (nnx.Dict(a=2, b=1) == other) is (other == {"a": 2, "b": 1})
    if isinstance(other, dict):
        assert (nnx.Dict(other) == nnx.Dict(a=2, b=1)) is (other == {"a": 2, "b": 1})


# ------------------------------------------------------- attributes, views, conversions


class Leaf(nnx.Module):
    def __init__(self):
        self.rate = 0.5
        self.deterministic = self.decode = False
        self.weight = nnx.Param(jnp.ones(2))
        self.array = jnp.zeros(2)

    def set_view(
        self, deterministic: bool | None = None, *, decode: bool | None = None
    ):
        """Configures the leaf.

        Args:
            deterministic: whether dropout is off,
                also in the attention.
            decode (bool): whether to use the cache
        """
        self.deterministic = deterministic
        self.decode = decode


class Settings(nnx.Pytree):
    def set_view(self, **options):
        self.seen = tuple(sorted(options))


def model():
    return zoo.Box(leaf=Leaf(), norm=zoo.Box(size=1), plain=nnx.data([Leaf()]))


def test_modules_have_a_metaclass_and_take_no_arguments():
    assert type(nnx.Module) is nnx.module.ModuleMeta
    assert issubclass(nnx.module.ModuleMeta, nnx.pytreelib.PytreeMeta)
    with pytest.raises(TypeError):
        nnx.Module(1)


# ------------------------------------------------------------------- set_attributes


def test_set_attributes_matches_any_of_the_filters():
    node = nnx.Dict(a=Leaf(), b=Leaf(), c=zoo.Box(rate=0.5))
    node.set_attributes(nnx.PathContains("b"), zoo.Box, rate=0.1)
    assert (node.a.rate, node.b.rate, node.c.rate) == (0.5, 0.1, 0.1)


@pytest.mark.parametrize(
    ("filters", "attributes", "missing"),
    [((zoo.Box,), {"rate": 0.1}, "rate"), ((), {"rate": 0.1, "unknown": 1}, "unknown")],
    ids=["among the matching modules only", "nothing is set"],
)
def test_failed_set_attributes_changes_nothing(filters, attributes, missing):
    node = model()
    with pytest.raises(ValueError, match=rf"Could not find.*\['{missing}'\]"):
        node.set_attributes(*filters, **attributes)
    assert node.leaf.rate == 0.5


def test_set_attributes_refuses_modules_of_other_traces():
    leaf = Leaf()
    with pytest.raises(nnx.errors.TraceContextError, match="Cannot mutate 'Leaf'"):
        jax.jit(lambda: leaf.set_attributes(rate=0.1))()
    assert leaf.rate == 0.5


# ----------------------------------------------------------------------------- views


@pytest.mark.parametrize("options", [{}, {"decode": True}])
def test_views_are_copies_that_share_variables_and_arrays(options):
    node = model()
    view = nnx.view(node, **options)
    assert view is not node and view.leaf is not node.leaf
    assert view.leaf.weight is node.leaf.weight and view.leaf.array is node.leaf.array


def test_views_pass_each_node_the_options_it_names():
    view = nnx.view([Leaf(), Settings()], decode=True, other=1)
    assert view[0].decode and view[1].seen == ("decode", "other")
    with pytest.raises(ValueError, match=r"Unused keys .*\['deterministic'\]"):
        nnx.view(nnx.Rngs(0), deterministic=True)


def test_views_and_attributes_are_made_in_both_modes(graph):
    view = nnx.view({"m": [Leaf()]}, decode=True, graph=graph)
    changed = nnx.with_attributes([model()], decode=True, graph=graph)
    assert view["m"][0].decode and changed[0].leaf.decode


def test_view_info_lists_each_class_once_by_name_with_its_parameters():
    expected = """\
Leaf:
  deterministic: bool | None = None
    whether dropout is off,
    also in the attention.
  decode: bool | None = None
    whether to use the cache"""
    assert nnx.view_info([model(), nnx.Rngs(0)]) == expected
    lines = nnx.view_info([Settings(), Leaf(), Leaf()]).splitlines()
    assert [x for x in lines if not x.startswith(" ")] == ["Leaf:", "Settings:"]
    assert nnx.view_info([Settings(), Leaf()], only=Settings).startswith("Settings:")
    assert nnx.view_info([nnx.Rngs(0), 1]) == ""


def test_view_info_does_without_descriptions():
    class Undescribed(nnx.Module):
        def set_view(self, a: int, b: str = "x", *args: int, **kwargs: int):
            """Says nothing of the first.

            Args:
                b: the second

            Returns:
                nothing
            """

    lines = nnx.view_info(Undescribed()).splitlines()[1:]
    assert lines == ["  a: <class 'int'>", "  b: <class 'str'> = x", "    the second"]


# ----------------------------------------------------------------- conversion to refs


def test_hijax_variables_are_a_filter():
    matches = nnx.filterlib.to_predicate(nnx.variablelib.HijaxVariable)
    variables = nnx.Param(1, hijax=True), nnx.Param(1)
    assert [matches((), v) for v in variables] == [True, False]


def test_cyclic_objects_and_shared_refs_are_converted():
    node = nnx.Dict(w=nnx.Param(jnp.ones(2)))
    node.self = node
    converted = nnx.with_vars(node, ref=True)
    assert converted.self is converted and converted.w.ref
    converted.bare = ref = converted.w.get_raw_value()
    arrays = nnx.to_arrays(converted)
    assert not arrays.w.ref and isinstance(arrays.bare, jax.Array)
    arrays = nnx.to_arrays({"a": ref, "b": ref}, allow_duplicates=True)
    assert arrays["a"] is arrays["b"]


def test_what_is_no_array_of_jax_stays_or_is_refused():
    state = {"a": np.ones(2)}
    assert nnx.to_refs(state)["a"] is state["a"]
    with pytest.raises(TypeError):
        nnx.to_refs(nnx.Dict(a=nnx.Param((1.0, 2.0))))
    converted = nnx.to_refs(nnx.Dict(a=nnx.Cache((1.0,))), only=nnx.Param)
    assert converted.a.get_value() == (1.0,)
    v = nnx.Param(jnp.ones(2))
    with pytest.raises(ValueError, match="allow_duplicates=True"):
        nnx.with_vars([v, v], ref=True)


# --------------------------------------------------------------- changes of structure


@nnx.remat
def drop_count(model):
    del model.count


@tables.cases(
    "change",
    drop_count,
    lambda model: model.layers.insert(0, jnp.full(1, 2.0)),
    lambda model: model.layers.__delitem__(2),
    ids=["remat", "insert", "delete"],
)
def test_what_stays_is_there_at_every_line(change):
    """Where another thread may look, and Ctrl-C interrupt."""
    layers = nnx.List([jnp.zeros(1), jnp.ones(1), jnp.ones(1)])
    model = nnx.Dict(layers=layers, count=0)

    def look(frame, event, arg):
        assert model.layers is layers and layers[0].shape == (1,) and len(layers) >= 2
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        change(model)
    finally:
        sys.settrace(before)
    assert "count" not in model or len(layers) != 3
