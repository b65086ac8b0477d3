"""Functions mapped over an axis of objects, or over devices: `vmap` to `shard_map`.

The rules of all maps are in `tests/contract/test_transforms/test_matrix.py`.
"""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import graftree as nnx
from tests import modes, strategies, zoo


def two():
    return zoo.Box(a=nnx.Param(jnp.arange(4.0)), b=nnx.BatchStat(jnp.arange(4.0)))


def test_state_axes_assign_axes_by_filter():
    axes = nnx.StateAxes({nnx.Param: 0, nnx.BatchStat: None})

    @nnx.vmap(in_axes=(axes,), out_axes=(0, axes))
    def product(pair):
        product = pair.a * pair.b
        pair.a[...] *= 2
        pair.b[...] += 1
        return product, pair

    pair, numbers = two(), np.arange(4.0)
    pair.itself = pair
    found, same = product(pair)
    assert same is pair is pair.itself
    np.testing.assert_array_equal(found, np.outer(numbers, numbers))
    np.testing.assert_array_equal(pair.a, 2 * numbers)
    np.testing.assert_array_equal(pair.b, numbers + 1)


def test_aliases_with_equal_axes_stay_aliases():
    foo = two()

    @nnx.vmap(in_axes=(0, nnx.StateAxes({...: 0})))
    def same(first, second):
        assert first is second
        return second

    assert same(foo, foo) is foo


def test_a_size_is_needed_where_nothing_is_mapped(mode):
    make = nnx.vmap(lambda: nnx.Param(jnp.ones(2)), axis_size=3, **mode)
    assert make().shape == (3, 2)


@pytest.mark.parametrize("transform", [nnx.vmap, nnx.pmap])
def test_keywords_are_mapped_over_axis_0_without_graph_updates(value_mode, transform):
    foo, x = two(), jnp.arange(4.0)

    def write(x, *, foo):
        foo.a[...] += x
        return foo.a[...]

    y = transform(write, in_axes=(0,), **value_mode)(x, foo=foo)
    np.testing.assert_array_equal(y, 2 * np.arange(4.0))
    np.testing.assert_array_equal(foo.a[...], y)


def test_new_objects_with_two_axes_are_refused(mode):
    def make(x):
        return (new := nnx.Param(jnp.full(2, x))), new

    phrase = "Inconsistent aliasing detected" if mode["graph"] else "Duplicate Param"
    with pytest.raises(ValueError, match=phrase):
        nnx.vmap(make, out_axes=(0, 1), **mode)(jnp.ones(3))


def test_shared_streams_give_one_key_to_all(mode):
    rngs = nnx.Rngs(0)
    draw = nnx.vmap(lambda rngs, x: rngs.uniform(()), in_axes=(None, 0), **mode)
    assert len(np.unique(draw(rngs, jnp.ones(3)))) == 1 and rngs.default.count[...] == 1


def test_random_streams_without_an_axis_are_told_with_the_way_out(mode):
    """Issue 12, §13."""
    draw = nnx.vmap(lambda rngs, x: x + rngs.normal(), **mode)
    with pytest.raises(ValueError, match="rank should be") as caught:
        draw(nnx.Rngs(noise=0, default=1), jnp.ones(3))
    notes = " ".join(caught.value.__notes__)
    assert "args[0].noise.key" in notes and "rngs.split(n)" in notes


def test_the_axis_has_a_name_for_collectives(mode):
    mean = nnx.vmap(lambda x: x - jax.lax.pmean(x, "i"), axis_name="i", **mode)
    np.testing.assert_array_equal(mean(jnp.arange(3.0)), [-1, 0, 1])


# ---------------------------------------------------------------------- pmap on its own


@pytest.mark.parametrize("in_axes", [0, (0, None, 0), [0, None, 0]])
def test_static_arguments_of_pmap_are_python_values(mode, in_axes):
    @nnx.pmap(in_axes=in_axes, static_broadcasted_argnums=1, **mode)
    def scale(foo, factor, x):
        assert type(factor) is int
        foo.a[...] *= factor
        return foo.a * x

    foo = two()
    np.testing.assert_array_equal(scale(foo, 2, np.ones(4)), 2 * np.arange(4.0))
    np.testing.assert_array_equal(foo.a[...], 2 * np.arange(4.0))


def test_static_arguments_of_pmap_are_not_donated():
    with pytest.raises(ValueError, match="cannot intersect"):
        nnx.pmap(lambda x: x, static_broadcasted_argnums=0, donate_argnums=0)


# ------------------------------------------------------ pmap assigns axes as vmap does
#
# Whatever the numbers of leaves and groups are: ``jax.pmap`` takes a tuple of axes for
# those of the single leaves if their number is that of its arguments (issue 12, §5).

AXES = st.sampled_from([0, 1, -1, None])
COUNTS = st.tuples(st.integers(0, 2), st.integers(0, 2))
# Each argument: what is in it, the axis of its parameters, that of the rest.
ARGUMENTS = st.lists(st.tuples(COUNTS | st.none(), AXES, AXES), min_size=1, max_size=3)


def leaf(number):
    return np.arange(8.0, dtype=np.float32).reshape(2, 2, 2) + 10 * number


def counted(params, statistics):
    return zoo.Box(
        params=nnx.List([nnx.Param(leaf(i)) for i in range(params)]),
        statistics=nnx.List([nnx.BatchStat(leaf(9 + i)) for i in range(statistics)]),
    )


def axes_of(args, arguments, mode):
    def axis(path, _):
        _, of_params, of_rest = arguments[path[0]]
        return of_params if "params" in path else of_rest

    if mode != modes.GRAPH_UPDATES:
        return nnx.prefix(args, axis, graph=mode["graph"])
    return tuple(
        rest if counts is None else nnx.StateAxes({nnx.Param: params, ...: rest})
        for counts, params, rest in arguments
    )


def scale(*args):
    """Writes what is mapped, and returns all that is given."""
    given = jax.tree.leaves(args)
    for x in jax.tree.leaves(args, is_leaf=lambda x: isinstance(x, nnx.Variable)):
        if isinstance(x, nnx.Variable) and x.ndim < 3:
            x[...] = x[...] * 2
    return given, nnx.Param(sum(x.sum() for x in given))


def outcome(transform, arguments, out_axis, mode):
    args = tuple(
        leaf(number) if counts is None else counted(*counts)
        for number, (counts, _, _) in enumerate(arguments)
    )
    axes = axes_of(args, arguments, mode)
    f = transform(scale, in_axes=axes, out_axes=(out_axis, 0), **mode)
    return [x.tolist() for x in jax.tree.leaves((f(*args), args))]


def is_mapped(argument):
    counts, of_params, of_rest = argument
    params, rest = (0, 1) if counts is None else counts
    return bool((params and of_params is not None) or (rest and of_rest is not None))


@strategies.examples(2, 25)
@hypothesis.given(arguments=ARGUMENTS, out_axis=st.sampled_from([0, 1, -1]))
@hypothesis.example([((2, 0), 0, None)], 0)
@hypothesis.example([((0, 2), None, 0)], 0)
@hypothesis.example([((1, 1), 0, None)], 1)
@hypothesis.example([((3, 0), 0, 1)], -1)
@hypothesis.example([(None, 0, 1), ((1, 0), 1, 0)], -1)
def test_pmap_gives_what_vmap_gives(mode, arguments, out_axis):
    hypothesis.assume(any(map(is_mapped, arguments)))
    expected = outcome(nnx.vmap, arguments, out_axis, mode)
    assert outcome(nnx.pmap, arguments, out_axis, mode) == expected


# ---------------------------------------------------------------------------- shard_map


MESH = Mesh(np.array(jax.devices()), ("data",))
SPLIT = NamedSharding(MESH, P("data"))
NUMBERS = np.arange(8.0, dtype=np.float32)


def on_mesh(mode, in_specs, out_specs, **options):
    specs = {"in_specs": in_specs, "out_specs": out_specs}
    return nnx.shard_map(mesh=MESH, **specs, **options, **mode)


def test_a_model_is_split_by_a_prefix(value_mode):
    model = zoo.Box(up=nnx.Param(NUMBERS + 1), down=nnx.Param(NUMBERS))
    before = model.up.get_value()
    specs = {nnx.PathContains("up"): P("data"), ...: SPLIT.spec}
    prefix = nnx.prefix(model, specs, graph=value_mode["graph"])

    @on_mesh(value_mode, (prefix, P()), P())
    def apply(model, x):
        assert model.up.shape == model.down.shape == (1,)
        y = jax.lax.psum(model.up * model.down * x, "data")
        model.down[...] *= 2
        return y

    np.testing.assert_array_equal(apply(model, 2.0), [2 * 168.0])
    assert model.down[...].sharding == SPLIT and model.up.get_value() is before


def test_new_objects_are_put_together_from_their_parts(mode):
    @on_mesh(mode, P("data"), (P("data"), P()))
    def make(x):
        return nnx.Param(2 * x), nnx.Param(jax.lax.psum(x, "data"))

    parts, total = make(NUMBERS)
    np.testing.assert_array_equal(parts[...], 2 * NUMBERS)
    np.testing.assert_array_equal(total[...], [28.0])


def test_new_attributes_are_put_together_by_the_spec_of_their_object():
    model = zoo.Box(a=nnx.Param(np.ones((2, 8))))

    @on_mesh(modes.GRAPH_UPDATES, P(None, "data"), None)
    def add(model):
        model.new = nnx.Param(2 * model.a[...])

    add(model)
    assert model.new[...].sharding == NamedSharding(MESH, P(None, "data"))
    np.testing.assert_array_equal(model.new[...], np.full((2, 8), 2.0))


def test_unchanged_variables_come_back_sharded_with_graph_updates_only(mode):
    variable = nnx.Param(jnp.asarray(NUMBERS))
    before = variable[...]
    on_mesh(mode, P("data"), None)(lambda variable: None)(variable)
    if mode is modes.GRAPH_UPDATES:
        assert variable[...].sharding == SPLIT
    else:
        assert variable[...] is before
    np.testing.assert_array_equal(variable[...], NUMBERS)


def test_no_spec_is_the_empty_spec(mode):
    scale = nnx.Param(jnp.array(2.0))

    @on_mesh(mode, (None, P("data"), P()), (P("data"), None))
    def multiply(scale, x, nothing):
        assert x.shape == (1,)
        return scale[...] * x, nothing

    y, nothing = multiply(scale, NUMBERS, None)
    np.testing.assert_array_equal(y, 2 * NUMBERS)
    assert y.sharding == SPLIT and nothing is None
    assert on_mesh(mode, [P()], None)(lambda scale: scale[...] + 1)(scale) == 3


def test_specs_that_do_not_fit_are_named(mode):
    double = on_mesh(mode, (P("data"), P()), P("data"))(lambda x: 2 * x)
    with pytest.raises(ValueError, match="`in_specs` of nnx.shard_map must be a tree"):
        double(NUMBERS)


def test_outputs_are_checked_for_replication(mode):
    with pytest.raises(ValueError, match="out_specs which require replication"):
        on_mesh(mode, P("data"), P())(lambda x: x)(NUMBERS)
    first = on_mesh(mode, P("data"), P(), check_vma=False)(lambda x: x)(NUMBERS)
    assert first.shape == (1,)


def test_some_axes_of_the_mesh_stay_automatic(mode):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    specs = {"in_specs": SPLIT.spec, "out_specs": SPLIT.spec}

    @nnx.jit(**mode)
    @nnx.shard_map(mesh=mesh, axis_names={"data"}, **specs, **mode)
    def double(x):
        assert x.shape == (4,)
        return 2 * x

    np.testing.assert_array_equal(double(NUMBERS), 2 * NUMBERS)


def test_inner_is_the_function_of_jax():
    double = on_mesh({}, P("data"), P("data"))(lambda x: 2 * x)
    assert callable(double.inner) and double.inner is not double
