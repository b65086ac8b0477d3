"""What is assigned to the leaves of an object: by trees, filters, made prefixes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import graftree as nnx
from tests import meshes, tables, zoo

MESH = meshes.mesh_of(d=8)
EMPTY = P()
X3 = np.ones(3, np.float32)


NUMBERS = np.arange(4.0)


def make():
    return zoo.Box(a=nnx.Param(jnp.arange(4.0)), b=nnx.BatchStat(jnp.arange(4.0)))


PRODUCT = np.outer(NUMBERS + 1, NUMBERS)


def product(foo, x):
    """The mapped `PRODUCT`, if ``a`` is mapped and ``b`` is not."""
    foo.a[...] += x
    return foo.a * foo.b


def test_diff_state_is_a_frozen_pair_that_maps_leaves_by_its_filter():
    target = nnx.DiffState(0, nnx.Param)
    assert (target.argnum, target.filter) == (0, nnx.Param)
    assert target == nnx.DiffState(0, nnx.Param) and hash(target) is not None
    with pytest.raises(AttributeError):
        target.argnum = 1
    assert isinstance(target, nnx.extract.PrefixMapping)
    for leaf in (nnx.Param(1.0), nnx.BatchStat(1.0)):
        assert target.map_prefix(("a",), leaf) is isinstance(leaf, nnx.Param)


# --------------------------------------------------------------- prefixes as trees


@pytest.mark.parametrize("in_axes", [[0, None], (0, None), ({"foo": 0}, None)])
def test_prefixes_are_trees_or_lists(mode, in_axes):
    @nnx.vmap(in_axes=in_axes, out_axes=1, **mode)
    def scaled(first, x):
        return (first["foo"].a * x)[None]

    assert scaled({"foo": make()}, 2.0).tolist() == [[0, 2, 4, 6]]


def test_a_state_of_axes_is_the_prefix_of_a_state(mode):
    axes = nnx.State({"a": 0, "b": None})
    state = nnx.state(make())
    y = nnx.vmap(product, in_axes=(axes, None), **mode)(state, 1.0)
    np.testing.assert_array_equal(y, PRODUCT)
    np.testing.assert_array_equal(state["a"][...], NUMBERS + 1)


@tables.cases(
    "axes, args, place",
    ({"in_axes": ((0, 0), 0)}, ([X3], X3), r"[\s\S]* in_axes\[0\]\n"),
    ({"in_axes": (0,)}, (X3, X3), ""),
    ({"out_axes": (0, 1)}, (X3, X3), r"[\s\S]* out_axes\n"),
)
def test_a_prefix_that_does_not_fit_is_named(mode, axes, args, place):
    (name,) = axes
    phrase = f"`{name}` of nnx.vmap must be a tree prefix{place}"
    with pytest.raises(ValueError, match=phrase):
        nnx.vmap(lambda x, y: y, **axes, **mode)(*args)


@pytest.mark.parametrize("argument", ["in_axes", "out_axes"])
@tables.cases(
    "value, what", ([make()], "a container"), (NUMBERS, "an array"), ((), None)
)
def test_state_axes_are_for_one_object(argument, value, what):
    axes = nnx.StateAxes({...: 0})
    options = {"in_axes": (axes, 0)} if argument == "in_axes" else {"out_axes": axes}
    mapped = nnx.vmap(lambda x, _: x, **options)
    if what is None:
        assert mapped(value, X3) == value
        return
    phrase = f"`StateAxes` must be the prefix of one object.*`{argument}`.*{what}"
    with pytest.raises(ValueError, match=phrase):
        mapped(value, NUMBERS)


def test_state_axes_of_a_bare_variable():
    axes = nnx.StateAxes({nnx.Param: 1})
    y = nnx.vmap(lambda v: v[...], in_axes=(axes,))(nnx.Param(jnp.ones((2, 3))))
    assert y.shape == (3, 2)


def test_the_first_filter_of_state_axes_counts():
    axes = nnx.StateAxes({"a": None, nnx.Param: 0, ...: 1})
    model = make()
    assert axes.map_prefix(("a",), nnx.Param(0, tag="a")) is None
    assert axes.map_prefix(("a",), model.a) == 0
    assert axes.map_prefix(("b",), model.b) == 1
    assert axes.filters == ("a", nnx.Param, ...) and axes.axes == (None, 0, 1)


def test_state_axes_of_a_state_are_exact_paths():
    axes = nnx.StateAxes(nnx.State({"a": 0, "b": None}))
    assert nnx.vmap(lambda foo: foo.a * foo.b, in_axes=(axes,))(make()).shape == (4, 4)
    with pytest.raises(ValueError, match="No axis found for"):
        axes.map_prefix(("c",), nnx.Param(0))


def test_state_axes_may_carry():
    axes = nnx.StateAxes({nnx.Param: nnx.Carry, ...: None})
    assert axes.axes == (nnx.Carry, None)
    with pytest.raises(TypeError, match="Carry"):
        nnx.vmap(lambda foo: None, in_axes=(axes,))(make())


def test_state_axes_without_a_match_name_the_path():
    axes = nnx.StateAxes({nnx.Param: 0})
    with pytest.raises(ValueError, match="No axis found for.*'b'"):
        nnx.vmap(lambda foo: foo.a[...], in_axes=(axes,))(make())


def test_state_axes_are_a_mapping_compared_by_content():
    axes = nnx.StateAxes({nnx.Param: 0, ...: None})
    assert axes == nnx.StateAxes([(nnx.Param, 0), (..., None)])
    assert hash(axes) == hash(nnx.StateAxes({nnx.Param: 0, ...: None}))
    assert axes != nnx.StateAxes({nnx.Param: 1, ...: None})
    assert (list(axes), axes[...], len(axes)) == ([nnx.Param, ...], None, 2)
    assert repr(axes).startswith("StateAxes({")


# ------------------------------------------------- prefixes that are made by filters


BY_KIND = {nnx.Param: 0, nnx.BatchStat: None}


def test_the_prefix_of_a_tree_has_its_form():
    prefix = nnx.prefix({"foo": make(), "x": jnp.ones(3)}, lambda *_: "p", graph=False)
    assert type(prefix["foo"]) is zoo.Box
    assert (prefix["foo"].a, prefix["foo"].b, prefix["x"]) == ("p", "p", "p")


def test_the_prefix_of_a_graph_has_a_tree_state_per_object():
    prefix = nnx.prefix([make(), jnp.ones(3)], {**BY_KIND, ...: 1}, graph=True)
    assert isinstance(prefix[0], nnx.extract.TreeState) and prefix[1] == 1
    assert prefix[0].map_prefix(("a",), None) == 0
    assert prefix[0].map_prefix(("b",), None) is None
    assert prefix[0] == nnx.prefix(make(), BY_KIND, graph=True)
    assert hash(prefix[0]) == hash(nnx.prefix(make(), BY_KIND, graph=True))
    with pytest.raises(ValueError, match="no prefix for the Param at.*'new'"):
        prefix[0].map_prefix(("new",), nnx.Param(0))


def test_tree_states_are_pytrees_of_their_values():
    prefix = nnx.prefix(make(), {nnx.Param: 1, ...: 2}, graph=True)
    doubled = jax.tree.map(lambda value: 2 * value, prefix)
    assert doubled == nnx.prefix(make(), {nnx.Param: 2, ...: 4}, graph=True)


def test_functions_get_the_path_from_the_root(graph):
    seen = []
    node = ({"foo": make()}, X3, nnx.Param(0))
    nnx.prefix(node, lambda path, x: seen.append((path, type(x))), graph=graph)
    assert [path for path, _ in seen] == [(0, "foo", "a"), (0, "foo", "b"), (1,), (2,)]
    assert [kind for _, kind in seen][::3] == [nnx.Param, nnx.Param]


def test_a_leaf_without_a_filter_is_named(graph):
    with pytest.raises(ValueError, match=r"No filter matched leaf at path \(0, 'b'\)"):
        nnx.prefix([make()], {nnx.Param: 0}, graph=graph)


@tables.cases("like", make, lambda: jax.eval_shape(make), lambda: nnx.eval_shape(make))
def test_made_prefixes_are_axes(value_mode, like):
    prefix = nnx.prefix((like(), X3), {**BY_KIND, ...: None}, graph=value_mode["graph"])
    foo = make()
    y = nnx.vmap(product, in_axes=prefix, **value_mode)(foo, 1.0)
    np.testing.assert_array_equal(y, PRODUCT)
    np.testing.assert_array_equal(foo.a[...], NUMBERS + 1)


def test_made_prefixes_are_axes_of_outputs(value_mode):
    axes = {nnx.Param: -1, ...: None}
    prefix = nnx.prefix(jax.eval_shape(make), axes, graph=value_mode["graph"])

    def scaled(x):
        foo = make()
        foo.a[...] *= x
        return foo

    out = nnx.vmap(scaled, out_axes=prefix, **value_mode)(NUMBERS)
    np.testing.assert_array_equal(out.a[...], np.outer(NUMBERS, NUMBERS))
    np.testing.assert_array_equal(out.b[...], NUMBERS)


def test_shared_objects_have_one_prefix():
    foo = make()
    first, second = nnx.prefix((foo, [foo]), {...: 0}, graph=True)
    assert first == second[0] and first.map_prefix(("a",), foo.a) == 0
    with pytest.raises(ValueError, match="Duplicate Param.*"):
        nnx.prefix((foo, foo), {...: 0}, graph=False)


def test_made_prefixes_must_agree_where_objects_are_shared():
    foo = make()
    zero, none = (nnx.prefix(foo, {...: axis}, graph=True) for axis in (0, None))

    def mapped(*in_axes):
        same = nnx.vmap(lambda a, b: a is b, in_axes=in_axes, graph_updates=False)
        return same(foo, foo)

    phrase = "(?s)Inconsistent aliasing.*0/a: 0.*1/a: None"
    with pytest.raises(ValueError, match=phrase):
        mapped(zero, none)
    assert mapped(zero, zero).all()


def test_a_shared_variable_must_have_one_value():
    """Issue 12, §13."""
    shared = nnx.Param(1)
    pair = nnx.Dict(x=shared), nnx.Dict(y=shared)
    with pytest.raises(ValueError, match="(?s)Inconsistent aliasing.*0/x: 0.*1/y: 1"):
        nnx.prefix(pair, lambda path, _: path[0], graph=True)


def test_the_prefix_of_an_object_has_its_skeleton_and_its_values_as_a_state():
    """Issue 12, §13."""
    model = make()
    axes = nnx.prefix(model, {nnx.Param: 0, ...: 1}, graph=True)
    assert axes.graphdef == nnx.graphdef(model)
    assert nnx.to_pure_dict(axes.state) == {"a": 0, "b": 1}


# -------------------------------------------------------------------- what is no prefix


def same(x):
    return x


def sharded(*specs, **mode):
    in_specs, out_specs = specs
    options = {"mesh": MESH, "in_specs": in_specs, "out_specs": out_specs}
    return nnx.shard_map(same, **options, **mode)


# Each takes a prefix for the argument of `same`, or for its output.
PLACES = {
    "vmap in_axes": lambda p, **mode: nnx.vmap(same, in_axes=(p,), **mode),
    "vmap out_axes": lambda p, **mode: nnx.vmap(same, out_axes=(p,), **mode),
    "pmap in_axes": lambda p, **mode: nnx.pmap(same, in_axes=(p,), **mode),
    "pmap out_axes": lambda p, **mode: nnx.pmap(same, out_axes=(p,), **mode),
    "scan in_axes": lambda p, **mode: nnx.scan(same, in_axes=(p,), out_axes=0, **mode),
    "jit in_shardings": lambda p, **mode: nnx.jit(same, in_shardings=(p,), **mode),
    "jit out_shardings": lambda p, **mode: nnx.jit(same, out_shardings=(p,), **mode),
    "shard_map in_specs": lambda p, **mode: sharded((p,), EMPTY, **mode),
    "shard_map out_specs": lambda p, **mode: sharded(EMPTY, (p,), **mode),
}


@pytest.fixture(params=PLACES)
def place(request):
    """A place for a prefix: the name of a transform and of one of its arguments."""
    return request.param


def assert_refused(place, prefix, phrase, mode):
    transform, argument = place.split()
    with pytest.raises(ValueError, match=phrase) as error:
        PLACES[place](prefix, **mode)
    assert f"nnx.{transform}" in str(error.value)
    assert f"{argument}[0]" in str(error.value) or "hashable" in str(error.value)


def test_variables_are_no_prefixes(place, mode):
    phrase = "Variables prefixes are not supported: found a Param"
    assert_refused(place, nnx.Param(0), phrase, mode)
    assert_refused(place, {"x": nnx.Param(0)}, r"\[0\]\['x'\]", mode)


def test_objects_are_no_prefixes_of_graphs(place, graph_mode):
    prefix = nnx.prefix(make(), {...: None}, graph=False)
    phrase = "Graph nodes are not allowed as prefixes.*Box"
    assert_refused(place, prefix, phrase, graph_mode)


FILTERS = nnx.StateAxes({...: 0}), nnx.StateSharding({...: 0}), nnx.DiffState(0, ...)


@tables.cases("prefix", *FILTERS, ids=lambda prefix: type(prefix).__name__)
def test_filters_need_graph_updates(place, value_mode, prefix):
    phrase = f"`{place.split()[1]}` cannot contain `{type(prefix).__name__}` objects"
    assert_refused(place, prefix, phrase, value_mode)


@pytest.mark.parametrize("mode", [{}, {"graph": False}])
def test_tree_states_are_for_graphs_without_graph_updates(place, mode):
    prefix = nnx.prefix(make(), {...: None}, graph=True)
    phrase = "`TreeState` objects are only allowed as prefixes when graph=True and"
    assert_refused(place, prefix, phrase, mode)


def test_prefixes_must_be_hashable(place, mode):
    assert_refused(place, np.ones(2), "Prefixes must be hashable", mode)
