"""Prefix trees made by filters, for transforms that take no filters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import graftree as nnx


class Foo(nnx.Module):
    def __init__(self):
        self.a = nnx.Param(jnp.arange(4.0))
        self.b = nnx.BatchStat(jnp.arange(4.0))


def abstract(node):
    """The node with a stand-in for each array."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), node)


BY_KIND = {nnx.Param: 0, nnx.BatchStat: None}
WITHOUT_UPDATES = pytest.mark.parametrize(
    "mode",
    [{"graph": True, "graph_updates": False}, {"graph": False}],
    ids=["graph", "tree"],
)


def of_mode(node, filter_map, mode):
    return nnx.prefix(node, filter_map, graph=mode["graph"])


def test_the_prefix_of_a_tree_has_its_form():
    prefix = nnx.prefix({"foo": Foo(), "x": jnp.ones(3)}, lambda *_: "p", graph=False)
    assert isinstance(prefix["foo"], Foo)
    assert (prefix["foo"].a, prefix["foo"].b, prefix["x"]) == ("p", "p", "p")


def test_the_prefix_of_a_graph_has_a_tree_state_per_object():
    prefix = nnx.prefix([Foo(), jnp.ones(3)], {**BY_KIND, ...: 1}, graph=True)
    assert isinstance(prefix[0], nnx.extract.TreeState) and prefix[1] == 1
    assert prefix[0].map_prefix(("a",), None) == 0
    assert prefix[0].map_prefix(("b",), None) is None
    assert prefix[0] == nnx.prefix(Foo(), BY_KIND, graph=True)
    assert hash(prefix[0]) == hash(nnx.prefix(Foo(), BY_KIND, graph=True))
    with pytest.raises(ValueError, match="no prefix for the Param at.*'new'"):
        prefix[0].map_prefix(("new",), nnx.Param(0))


def test_tree_states_are_pytrees_of_their_values():
    prefix = nnx.prefix(Foo(), {nnx.Param: 1, ...: 2}, graph=True)
    doubled = jax.tree.map(lambda value: 2 * value, prefix)
    assert doubled == nnx.prefix(Foo(), {nnx.Param: 2, ...: 4}, graph=True)


@WITHOUT_UPDATES
def test_functions_get_the_path_from_the_root(mode):
    seen = []
    node = ({"foo": Foo()}, jnp.ones(2), nnx.Param(0))
    of_mode(node, lambda path, leaf: seen.append((path, type(leaf))), mode)
    assert [path for path, _ in seen] == [(0, "foo", "a"), (0, "foo", "b"), (1,), (2,)]
    assert [kind for _, kind in seen][::3] == [nnx.Param, nnx.Param]


@WITHOUT_UPDATES
def test_a_leaf_without_a_filter_is_named(mode):
    with pytest.raises(ValueError, match=r"No filter matched leaf at path \(0, 'b'\)"):
        of_mode([Foo()], {nnx.Param: 0}, mode)


@WITHOUT_UPDATES
@pytest.mark.parametrize(
    "make",
    [lambda foo: foo, abstract, lambda foo: nnx.eval_shape(lambda: nnx.clone(foo))],
    ids=["model", "shapes", "eval_shape"],
)
def test_made_prefixes_are_axes(mode, make):
    prefix = of_mode((make(Foo()), jnp.ones(())), {**BY_KIND, ...: None}, mode)

    @nnx.vmap(in_axes=prefix, **mode)
    def product(foo, x):
        foo.a[...] += x
        return foo.a * foo.b

    foo = Foo()
    expected = np.outer(np.arange(1.0, 5.0), np.arange(4.0))
    np.testing.assert_array_equal(product(foo, 1.0), expected)
    np.testing.assert_array_equal(foo.a[...], np.arange(1.0, 5.0))


@WITHOUT_UPDATES
def test_made_prefixes_are_axes_of_outputs(mode):
    prefix = of_mode(abstract(Foo()), {nnx.Param: -1, ...: None}, mode)

    def make(x):
        foo = Foo()
        foo.a[...] *= x
        return foo

    out = nnx.vmap(make, out_axes=prefix, **mode)(jnp.arange(3.0))
    np.testing.assert_array_equal(out.a[...], np.outer(np.arange(4.0), np.arange(3.0)))
    np.testing.assert_array_equal(out.b[...], np.arange(4.0))


def test_shared_objects_have_one_prefix():
    foo = Foo()
    first, second = nnx.prefix((foo, [foo]), {...: 0}, graph=True)
    assert first == second[0] and first.map_prefix(("a",), foo.a) == 0
    with pytest.raises(ValueError, match="Duplicate Param.*"):
        nnx.prefix((foo, foo), {...: 0}, graph=False)


def test_made_prefixes_must_agree_where_objects_are_shared():
    foo = Foo()
    zero, one = (nnx.prefix(foo, {...: axis}, graph=True) for axis in (0, None))
    mapped = nnx.vmap(
        lambda a, b, x: a is b, in_axes=(zero, one, 0), graph_updates=False
    )
    with pytest.raises(
        ValueError, match="(?s)Inconsistent aliasing.*0/a: 0.*1/a: None"
    ):
        mapped(foo, foo, jnp.ones(4))
    same = nnx.vmap(
        lambda a, b: jnp.array(a is b), in_axes=(zero, zero), graph_updates=False
    )
    assert same(foo, foo).all()


@WITHOUT_UPDATES
def test_made_prefixes_are_shardings(mode):
    mesh = Mesh(jax.devices(), ("d",))
    on_mesh, everywhere = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())
    model = nnx.Linear(2, 8, rngs=nnx.Rngs(0))
    by_name = {nnx.PathContains("bias"): on_mesh, ...: everywhere}
    prefix = of_mode(model, by_name, mode)

    @nnx.jit(in_shardings=(prefix,), out_shardings=prefix, **mode)
    def double(model):
        model.bias[...] += 1
        return nnx.clone(model)

    out = double(model)
    assert model.bias[...].sharding == out.bias[...].sharding == on_mesh
    assert out.kernel[...].sharding == everywhere


def test_a_shared_variable_must_have_one_value():
    """Issue 12, §13."""
    shared = nnx.Param(jnp.ones(2))
    pair = nnx.Dict(x=shared), nnx.Dict(y=shared)
    with pytest.raises(ValueError, match="Inconsistent aliasing") as caught:
        nnx.prefix(pair, lambda path, _: path[0], graph=True)
    assert "0/x: 0" in str(caught.value) and "1/y: 1" in str(caught.value)


def test_the_prefix_of_an_object_has_its_skeleton_and_its_values_as_a_state():
    """Issue 12, §13."""
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    axes = nnx.prefix(model, {"kernel": 0, ...: 1}, graph=True)
    assert axes.graphdef == nnx.graphdef(model)
    assert nnx.to_pure_dict(axes.state) == {"kernel": 1, "bias": 1}
