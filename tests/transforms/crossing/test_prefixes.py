"""What is assigned to the leaves of an object: by trees, filters, made prefixes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import graftree as nnx
from tests import zoo

MESH = Mesh(jax.devices(), ("d",))
EMPTY = P()


def make():
    return zoo.Box(a=nnx.Param(jnp.arange(4.0)), b=nnx.BatchStat(jnp.arange(4.0)))


def test_diff_state_is_a_frozen_pair():
    target = nnx.DiffState(0, nnx.Param)
    assert (target.argnum, target.filter) == (0, nnx.Param)
    assert target == nnx.DiffState(0, nnx.Param) and hash(target) is not None
    with pytest.raises(AttributeError):
        target.argnum = 1
    assert isinstance(target, nnx.extract.PrefixMapping)


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (nnx.Param, [True, False]),
        ("tagged", [False, True]),
        (nnx.PathContains("a"), [True, False]),
        ((nnx.Param, nnx.BatchStat), [True, True]),
        (..., [True, True]),
    ],
    ids=str,
)
def test_diff_state_maps_leaves_by_its_filter(chosen, expected):
    leaves = {
        ("a",): nnx.Param(jnp.array(1.0)),
        ("b",): nnx.BatchStat(jnp.array(1.0), tag="tagged"),
    }
    target = nnx.DiffState(0, chosen)
    assert [target.map_prefix(path, leaf) for path, leaf in leaves.items()] == expected


# --------------------------------------------------------------- prefixes as trees


@pytest.mark.parametrize("in_axes", [[0, None], (0, None), ({"foo": 0}, None)])
def test_prefixes_are_trees_or_lists(mode, in_axes):
    def product(first, x):
        return (first["foo"].a * x)[None]

    y = nnx.vmap(product, in_axes=in_axes, out_axes=1, **mode)({"foo": make()}, 2.0)
    np.testing.assert_array_equal(y, [[0, 2, 4, 6]])


def test_a_state_of_axes_is_the_prefix_of_a_state(mode):
    axes = nnx.State({"a": 0, "b": None})

    def product(state):
        state["a"][...] += 1
        return state["a"] * state["b"]

    state = nnx.state(make())
    y = nnx.vmap(product, in_axes=(axes,), **mode)(state)
    np.testing.assert_array_equal(y, np.outer(np.arange(1.0, 5.0), np.arange(4.0)))
    np.testing.assert_array_equal(state["a"][...], np.arange(1.0, 5.0))


def test_a_prefix_that_does_not_fit_is_named(mode):
    x = jnp.ones(3)
    phrase = r"(?s)`in_axes` of nnx.vmap must be a tree prefix.* in_axes\[0\]\n"
    with pytest.raises(ValueError, match=phrase):
        nnx.vmap(lambda x, y: x, in_axes=((0, 0), 0), **mode)([x], x)
    with pytest.raises(ValueError, match="`in_axes` of nnx.vmap must be a tree prefix"):
        nnx.vmap(lambda x, y: x, in_axes=(0,), **mode)(x, x)
    phrase = r"(?s)`out_axes` of nnx.vmap must be a tree prefix.* out_axes\n"
    with pytest.raises(ValueError, match=phrase):
        nnx.vmap(lambda x: x, out_axes=(0, 1), **mode)(x)


@pytest.mark.parametrize("argument", ["in_axes", "out_axes"])
@pytest.mark.parametrize(
    ("value", "what"),
    [([make()], "a container"), (make().a[...], "an array"), ((), None)],
    ids=["list", "array", "nothing"],
)
def test_state_axes_are_for_one_object(argument, value, what):
    axes = nnx.StateAxes({...: 0})
    options = {"in_axes": (axes, 0)} if argument == "in_axes" else {"out_axes": axes}
    mapped = nnx.vmap(lambda x, _: x, **options)
    if what is None:
        assert mapped(value, jnp.ones(3)) == value
        return
    phrase = f"`StateAxes` must be the prefix of one object.*`{argument}`.*{what}"
    with pytest.raises(ValueError, match=phrase):
        mapped(value, jnp.ones(4))


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
    y = nnx.vmap(lambda foo: foo.a * foo.b, in_axes=(axes,))(make())
    assert y.shape == (4, 4)
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


def abstract(node):
    """The node with a stand-in for each array."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), node)


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


def test_functions_get_the_path_from_the_root(value_mode):
    seen = []
    node = ({"foo": make()}, jnp.ones(2), nnx.Param(0))
    nnx.prefix(
        node,
        lambda path, leaf: seen.append((path, type(leaf))),
        graph=value_mode["graph"],
    )
    assert [path for path, _ in seen] == [(0, "foo", "a"), (0, "foo", "b"), (1,), (2,)]
    assert [kind for _, kind in seen][::3] == [nnx.Param, nnx.Param]


def test_a_leaf_without_a_filter_is_named(value_mode):
    with pytest.raises(ValueError, match=r"No filter matched leaf at path \(0, 'b'\)"):
        nnx.prefix([make()], {nnx.Param: 0}, graph=value_mode["graph"])


@pytest.mark.parametrize(
    "like",
    [lambda foo: foo, abstract, lambda foo: nnx.eval_shape(lambda: nnx.clone(foo))],
    ids=["model", "shapes", "eval_shape"],
)
def test_made_prefixes_are_axes(value_mode, like):
    prefix = nnx.prefix(
        (like(make()), jnp.ones(())), {**BY_KIND, ...: None}, graph=value_mode["graph"]
    )

    @nnx.vmap(in_axes=prefix, **value_mode)
    def product(foo, x):
        foo.a[...] += x
        return foo.a * foo.b

    foo = make()
    expected = np.outer(np.arange(1.0, 5.0), np.arange(4.0))
    np.testing.assert_array_equal(product(foo, 1.0), expected)
    np.testing.assert_array_equal(foo.a[...], np.arange(1.0, 5.0))


def test_made_prefixes_are_axes_of_outputs(value_mode):
    prefix = nnx.prefix(
        abstract(make()), {nnx.Param: -1, ...: None}, graph=value_mode["graph"]
    )

    def scaled(x):
        foo = make()
        foo.a[...] *= x
        return foo

    out = nnx.vmap(scaled, out_axes=prefix, **value_mode)(jnp.arange(3.0))
    np.testing.assert_array_equal(out.a[...], np.outer(np.arange(4.0), np.arange(3.0)))
    np.testing.assert_array_equal(out.b[...], np.arange(4.0))


def test_shared_objects_have_one_prefix():
    foo = make()
    first, second = nnx.prefix((foo, [foo]), {...: 0}, graph=True)
    assert first == second[0] and first.map_prefix(("a",), foo.a) == 0
    with pytest.raises(ValueError, match="Duplicate Param.*"):
        nnx.prefix((foo, foo), {...: 0}, graph=False)


def test_made_prefixes_must_agree_where_objects_are_shared():
    foo = make()
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


def test_made_prefixes_are_shardings(value_mode):
    on_mesh, everywhere = (NamedSharding(MESH, x) for x in (P("d"), EMPTY))
    model = nnx.Linear(2, 8, rngs=nnx.Rngs(0))
    by_name = {nnx.PathContains("bias"): on_mesh, ...: everywhere}
    prefix = nnx.prefix(model, by_name, graph=value_mode["graph"])

    @nnx.jit(in_shardings=(prefix,), out_shardings=prefix, **value_mode)
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


# -------------------------------------------------------------------- what is no prefix


def identity(x):
    return x


# Each takes a prefix for the argument of `identity`, or for its output.
PLACES = {
    "vmap in_axes": lambda p, **mode: nnx.vmap(identity, in_axes=(p,), **mode),
    "vmap out_axes": lambda p, **mode: nnx.vmap(identity, out_axes=(p,), **mode),
    "pmap in_axes": lambda p, **mode: nnx.pmap(identity, in_axes=(p,), **mode),
    "pmap out_axes": lambda p, **mode: nnx.pmap(identity, out_axes=(p,), **mode),
    "jit in_shardings": lambda p, **mode: nnx.jit(identity, in_shardings=(p,), **mode),
    "jit out_shardings": lambda p, **mode: nnx.jit(
        identity, out_shardings=(p,), **mode
    ),
    "shard_map in_specs": lambda p, **mode: nnx.shard_map(
        identity, mesh=MESH, in_specs=(p,), out_specs=EMPTY, **mode
    ),
    "shard_map out_specs": lambda p, **mode: nnx.shard_map(
        identity, mesh=MESH, in_specs=EMPTY, out_specs=(p,), **mode
    ),
}


@pytest.fixture(params=PLACES)
def place(request):
    """A place for a prefix: its name, and a transform that has a prefix there."""
    return request.param, PLACES[request.param]


def assert_refused(place, prefix, phrase, mode):
    (name, make), refused = place, pytest.raises(ValueError, match=phrase)
    transform, argument = name.split()
    with refused as error:
        make(prefix, **mode)
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


@pytest.mark.parametrize(
    "prefix",
    [nnx.StateAxes({...: 0}), nnx.StateSharding({...: 0}), nnx.DiffState(0, ...)],
    ids=lambda prefix: type(prefix).__name__,
)
def test_filters_need_graph_updates(place, value_mode, prefix):
    phrase = f"`{place[0].split()[1]}` cannot contain `{type(prefix).__name__}` objects"
    assert_refused(place, prefix, phrase, value_mode)


@pytest.mark.parametrize("mode", [{}, {"graph": False}])
def test_tree_states_are_for_graphs_without_graph_updates(place, mode):
    prefix = nnx.prefix(make(), {...: None}, graph=True)
    phrase = "`TreeState` objects are only allowed as prefixes when graph=True and"
    assert_refused(place, prefix, phrase, mode)


def test_prefixes_must_be_hashable(place, mode):
    assert_refused(place, np.ones(2), "Prefixes must be hashable", mode)
