"""The order of the items of a Dict: of insertion outside, sorted in what is rebuilt.

The contract wants both, so a program whose result depends on the order is told, where
it is traced.
"""

import warnings

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import graftree as nnx
from tests import zoo

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
