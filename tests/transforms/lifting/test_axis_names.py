"""The names of mapped axes in the annotations of Variables."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import graftree as nnx
from tests import meshes, tables, zoo

LAYERS = {nnx.PARTITION_NAME: "layers"}


def annotated(value, *names, **metadata):
    return nnx.Param(value, out_sharding=names, eager_sharding=False, **metadata)


def stacked():
    """An annotated Variable, stacked along its second axis; one without annotation."""
    kernel = annotated(jnp.ones((2, 3)), "features", "layers")
    return zoo.Box(kernel=kernel, bias=nnx.Param(jnp.zeros((2, 3))))


def check_stacked(model, kernel):
    """Asserts that the names are those of `stacked`, and what the kernel is."""
    assert model.kernel.out_sharding == ("features", "layers")
    np.testing.assert_array_equal(model.kernel, kernel)


class Recorder(nnx.Param):
    """Keeps what it is told about axes."""

    calls = []

    def add_axis(self, axis_index, axis_name):
        self.calls.append(("add", axis_index, axis_name))

    def remove_axis(self, axis_index, axis_name):
        self.calls.append(("remove", axis_index, axis_name))


# -------------------------------------------- the argument of vmap and other transforms


@pytest.mark.parametrize("transform", [nnx.vmap, nnx.pmap, nnx.scan])
@tables.cases(
    "axis, names, shape",
    (1, ("features", "layers"), (2, 3)),
    (-1, ("features", "layers"), (2, 3)),
    (-2, ("layers", "features"), (3, 2)),
)
def test_new_variables_get_the_name_at_the_axis(mode, transform, axis, names, shape):
    options = {"in_axes": 0, "out_axes": axis, "transform_metadata": LAYERS}
    make = transform(lambda x: annotated(jnp.full(2, x), "features"), **options, **mode)
    stack = make(jnp.arange(3.0))
    assert (stack.out_sharding, stack.shape) == (names, shape)


@tables.cases(
    "names, metadata, expected, nickname",
    (("a",), {}, ("a", None, "layers"), None),
    (("a", "b"), {"nickname": ("n",)}, ("a", "b", "layers"), ("n", None, "nick")),
    ids=["short", "other tuples"],
)
def test_annotations_get_their_names(mode, names, metadata, expected, nickname):
    options = {nnx.PARTITION_NAME: "layers", "nickname": "nick"}

    @nnx.vmap(out_axes=-1, transform_metadata=options, **mode)
    def make(x):
        return annotated(jnp.full((2, 2), x), *names, **metadata)

    made = make(jnp.ones(3))
    assert made.out_sharding == expected
    assert made.get_metadata().get("nickname") == nickname


def split(x):
    """A new Variable whose mapped axis may be divided."""
    return nnx.Param(x * jnp.ones(2), out_sharding=(None,))


@pytest.mark.parametrize("is_compiled", [False, True])
def test_new_variables_are_placed_as_annotated(mode, is_compiled):
    # Flax NNX leaves them where they were before the axis had its name.
    axes, options = (nnx.Carry, 0), {"transform_metadata": LAYERS, **mode}
    mapped, step = nnx.vmap(split, **options), lambda carry, x: (carry, split(x))
    scanned = nnx.scan(step, in_axes=axes, out_axes=axes, **options)

    def make(x):
        return mapped(x), scanned(jnp.array(0.0), x)[1]

    with jax.set_mesh(meshes.mesh_of(layers=4)):
        for made in (nnx.jit(make, **mode) if is_compiled else make)(jnp.arange(4.0)):
            assert made.out_sharding == ("layers", None)
            assert made[...].sharding.shard_shape(made.shape) == (1, 2)


def test_a_name_without_an_axis_of_the_mesh_places_nothing(mode):
    make = nnx.vmap(split, transform_metadata=LAYERS, **mode)
    with jax.set_mesh(meshes.mesh_of(data=4)):
        assert make(jnp.arange(4.0)).out_sharding == ("layers", None)
        with nnx.logical_axis_rules([("layers", "data")]):
            made = make(jnp.arange(4.0))
    assert made[...].sharding.shard_shape(made.shape) == (1, 2)


def test_with_explicit_axes_the_mapped_axis_is_not_divided(mode):
    # As in Flax NNX: JAX maps and scans only what is divided alike.
    @nnx.vmap(transform_metadata=LAYERS, **mode)
    def make(x):
        return nnx.Dict(a=split(x), b=nnx.Param(x))

    @nnx.vmap(in_axes=(0, None), transform_metadata=LAYERS, **mode)
    def apply(model, x):
        return model.a * x + model.b

    with jax.set_mesh(meshes.mesh_of("Explicit", layers=4)):
        model = make(jnp.arange(4.0))
        assert model.a.out_sharding == ("layers", None)
        assert model.a[...].sharding.is_fully_replicated
        assert apply(model, jnp.array(2.0)).shape == (4, 2)


def test_names_of_an_axis_that_another_transform_maps_place_nothing(mode):
    named = nnx.transform_metadata(split, partition="layers", graph=mode["graph"])
    with jax.set_mesh(meshes.mesh_of(layers=4)):
        made = jax.vmap(named)(jnp.arange(4.0))
    assert made.out_sharding == ("layers", None) and made.shape == (4, 2)


@pytest.mark.parametrize("transform", [nnx.vmap, nnx.scan])
@pytest.mark.parametrize("axis", [1, -1])
def test_arguments_lack_the_name_inside_only(mode, transform, axis):
    model, seen = stacked(), []

    def double(model, x):
        seen.append(model.kernel.out_sharding)
        model.kernel[...] *= 2
        return x

    axes = {"in_axes": (axis, 0), "out_axes": 0}
    transform(double, transform_metadata=LAYERS, **axes, **mode)(model, jnp.ones(3))
    assert {*seen} == {("features",)} and not model.bias.has_metadata("out_sharding")
    check_stacked(model, np.full((2, 3), 2.0))


def test_annotations_of_arguments_keep_their_form(mode):
    spec = P("layers", None)
    for annotation in (spec, NamedSharding(meshes.mesh_of(layers=1), spec)):
        metadata = {"out_sharding": annotation, "eager_sharding": False}
        variable = nnx.Param(jnp.ones((3, 2)), **metadata)
        before = variable.get_metadata()
        nnx.vmap(lambda v: None, transform_metadata=LAYERS, **mode)(variable)
        assert variable.get_metadata() == before
        assert type(variable.out_sharding) is type(annotation)


def test_shared_variables_have_no_name_to_lose(mode):
    shared = annotated(jnp.ones(2), "features")
    check = functools.partial(check_names, ("features",))
    see = nnx.vmap(check, in_axes=(None, 0), transform_metadata=LAYERS, **mode)
    see(shared, jnp.ones(3))
    check(shared)


def check_names(names, variable, *_):
    assert variable.out_sharding == names


@pytest.mark.parametrize("options", [{nnx.PARTITION_NAME: "other"}, {"other": 1}])
def test_another_name_is_an_error_and_other_metadata_changes_nothing(mode, options):
    model = stacked()
    see = nnx.vmap(lambda m: None, in_axes=1, transform_metadata=options, **mode)
    if "other" in options:
        see(model)
    else:
        with pytest.raises(ValueError, match="Expected to remove 'other' at index 1"):
            see(model)
    check_stacked(model, np.ones((2, 3)))


def test_variables_are_told_once(mode):
    Recorder.calls.clear()
    stack = nnx.vmap(Recorder, transform_metadata=LAYERS, **mode)(jnp.ones((3, 2)))
    assert Recorder.calls == [("add", 0, "layers")]
    nnx.vmap(lambda v: None, transform_metadata=LAYERS, **mode)(stack)
    assert Recorder.calls[1:] == [("remove", 0, "layers"), ("add", 0, "layers")]


def test_new_attributes_of_arguments_get_the_name():
    @nnx.vmap(in_axes=1, transform_metadata=LAYERS)
    def add(model):
        model.new = annotated(model.kernel[...], "features")
        del model.bias

    model = stacked()
    add(model)
    assert model.new.out_sharding == ("features", "layers")
    assert model.new.shape == (2, 3)


def test_state_axes_name_what_they_map():
    names = {"out_sharding": ("features",), "eager_sharding": False}
    a = annotated(jnp.ones((3, 2)), "layers", "features")
    pair = zoo.Box(a=a, b=nnx.BatchStat(jnp.ones(2), **names))

    def see(pair):
        assert pair.a.out_sharding == pair.b.out_sharding == ("features",)

    axes = nnx.StateAxes({nnx.Param: 0, ...: None})
    nnx.vmap(see, in_axes=(axes,), transform_metadata=LAYERS)(pair)
    assert pair.a.out_sharding == ("layers", "features")


# ------------------------------------------------------ the decorator, inside of others


def test_the_axes_of_the_decorator_are_the_first_ones(graph):
    @jax.vmap
    @nnx.transform_metadata(partition="layers", graph=graph)
    def see(layer):
        check_names(("features",), layer)
        return annotated(layer[...] + 1, "features")

    names = "layers", "features"
    check_names(names, see(annotated(jnp.ones((3, 2)), *names)))


def test_the_decorator_works_in_a_scan_of_jax(graph):
    stack = annotated(jnp.arange(6.0).reshape(3, 2), "layers", "features")
    axes = {"in_axes": (nnx.Carry, 0), "out_axes": (nnx.Carry, 0)}

    @nnx.transform_metadata(**axes, partition="layers", graph=graph)
    def step(total, layer):
        check_names(("features",), layer)
        return total + layer[...], annotated(total, "features")

    total, before = jax.lax.scan(step, jnp.zeros(2), stack)
    assert before.out_sharding == ("layers", "features")
    assert total.tolist() == [6, 9]
    assert before[...].tolist() == [[0, 0], [0, 1], [2, 4]]


def test_what_has_no_integer_axis_is_passed_over(graph):
    axes = {"in_axes": (None, 0), "out_axes": None}
    check = functools.partial(check_names, ("features",))
    see = nnx.transform_metadata(check, partition="layers", graph=graph, **axes)
    jax.vmap(see, **axes)(annotated(jnp.ones(2), "features"), jnp.ones(3))


def test_a_failed_call_leaves_names_and_values(graph):
    model = stacked()

    @nnx.transform_metadata(in_axes=1, partition="layers", graph=graph)
    def fail(model):
        model.kernel[...] *= 2
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        fail(model)
    check_stacked(model, np.ones((2, 3)))


def test_aliases_are_refused_with_different_axes():
    model = stacked()
    options = {"in_axes": (0, 1), "partition": "layers", "graph": True}
    see = nnx.transform_metadata(lambda a, b: None, **options)
    with pytest.raises(ValueError, match="Inconsistent aliasing detected"):
        see(model, model)


def test_the_decorator_takes_no_filters():
    axes = nnx.StateAxes({...: 0})
    with pytest.raises(ValueError, match="`in_axes` cannot contain `StateAxes`"):
        nnx.transform_metadata(in_axes=(axes,), partition="layers")
