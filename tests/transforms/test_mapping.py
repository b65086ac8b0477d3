"""Functions mapped over an axis of objects: `vmap` and `pmap`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx

MODES = pytest.mark.parametrize(
    "mode",
    [
        {"graph": True, "graph_updates": True},
        {"graph": True, "graph_updates": False},
        {"graph": False},
    ],
    ids=["graph_updates", "graph", "tree"],
)
TRANSFORMS = pytest.mark.parametrize("transform", [nnx.vmap, nnx.pmap])


class Foo(nnx.Module):
    def __init__(self):
        self.a = nnx.Param(jnp.arange(4.0))
        self.b = nnx.BatchStat(jnp.arange(4.0))


def count(counter, x):
    counter[...] += 1
    return x


@MODES
def test_new_objects_are_stacked(mode):
    make = nnx.vmap(lambda rngs: nnx.Linear(2, 3, rngs=rngs), **mode)
    stack = make(nnx.Rngs(0).split(4))
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), 0), 4)
    for i, key in enumerate(keys):
        expected = nnx.Linear(2, 3, rngs=nnx.Rngs(key)).kernel[...]
        np.testing.assert_array_equal(stack.kernel[i], expected)


@MODES
@TRANSFORMS
def test_updates_come_back_on_the_axis_they_entered(mode, transform):
    variable = nnx.Variable(jnp.ones((3, 4)))

    @transform(in_axes=(1, 0), **mode)
    def scale(variable, x):
        assert variable.shape == (3,)
        variable[...] *= x

    scale(variable, jnp.arange(4.0))
    np.testing.assert_array_equal(variable[...], np.ones((3, 1)) * np.arange(4.0))


@MODES
@TRANSFORMS
def test_shared_variables_are_updated_once(mode, transform):
    counter = nnx.Variable(jnp.array(0))
    transform(count, in_axes=(None, 0), **mode)(counter, jnp.ones(3))
    assert counter[...] == 1


@MODES
def test_batched_writes_to_shared_variables_name_the_variable(mode):
    foo = Foo()

    def write(foo, x):
        foo.a[...] = foo.a * x

    with pytest.raises(ValueError, match="at vmap.*'a'.*axis spec None but output was"):
        nnx.vmap(write, in_axes=(None, 0), **mode)(foo, jnp.ones(3))
    np.testing.assert_array_equal(foo.a[...], np.arange(4.0))


@MODES
def test_a_failed_call_leaves_the_caller_untouched(mode):
    foo = Foo()
    before = foo.a[...]

    def fail(foo):
        foo.a[...] = foo.a * 2
        foo.new = 1
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        nnx.vmap(fail, **mode)(foo)
    assert foo.a[...] is before and not hasattr(foo, "new")


@MODES
def test_closures_can_be_read_but_not_written(mode):
    counter = nnx.Variable(jnp.array(2.0))
    doubled = nnx.vmap(lambda x: x * counter[...], **mode)(jnp.arange(3.0))
    np.testing.assert_array_equal(doubled, [0, 2, 4])
    with pytest.raises(nnx.errors.TraceContextError):
        nnx.vmap(lambda x: count(counter, x), **mode)(jnp.ones(3))


def test_structure_reaches_the_caller_with_graph_updates_only():
    def add(foo):
        foo.new = nnx.Param(foo.a * 2)

    kept, dropped = Foo(), Foo()
    nnx.vmap(add)(kept)
    nnx.vmap(add, graph_updates=False)(dropped)
    np.testing.assert_array_equal(kept.new[...], 2 * np.arange(4.0))
    assert not hasattr(dropped, "new")


def test_state_axes_assign_axes_by_filter():
    @nnx.vmap(in_axes=(nnx.StateAxes({nnx.Param: 0, nnx.BatchStat: None}),))
    def product(foo):
        return foo.a * foo.b

    expected = np.outer(np.arange(4.0), np.arange(4.0))
    np.testing.assert_array_equal(product(Foo()), expected)


def test_state_axes_without_a_match_name_the_path():
    axes = nnx.StateAxes({nnx.Param: 0})
    with pytest.raises(ValueError, match="No axis found for.*'b'"):
        nnx.vmap(lambda foo: foo.a[...], in_axes=(axes,))(Foo())


def test_state_axes_are_a_mapping_compared_by_content():
    axes = nnx.StateAxes({nnx.Param: 0, ...: None})
    assert axes == nnx.StateAxes([(nnx.Param, 0), (..., None)])
    assert hash(axes) == hash(nnx.StateAxes({nnx.Param: 0, ...: None}))
    assert axes != nnx.StateAxes({nnx.Param: 1, ...: None})
    assert (list(axes), axes[...], len(axes)) == ([nnx.Param, ...], None, 2)
    assert repr(axes).startswith("StateAxes({")


@pytest.mark.parametrize("mode", [{"graph_updates": False}, {"graph": False}])
def test_state_axes_need_graph_updates(mode):
    axes = nnx.StateAxes({...: 0})
    with pytest.raises(
        ValueError, match="`in_axes` cannot contain `StateAxes` objects"
    ):
        nnx.vmap(lambda foo: foo, in_axes=(axes,), **mode)


def test_aliases_with_different_axes_are_refused():
    foo = Foo()
    phrase = r"(?s)Inconsistent aliasing detected.*Param.*0/a: 0.*1/a: None"
    with pytest.raises(ValueError, match=phrase):
        nnx.vmap(lambda a, b: 0.0, in_axes=(0, None))(foo, foo)
    with pytest.raises(ValueError, match="Inconsistent aliasing detected"):
        nnx.vmap(lambda foo: foo, in_axes=0, out_axes=1)(foo)


def test_aliases_with_equal_axes_stay_aliases():
    foo = Foo()

    @nnx.vmap(in_axes=(0, nnx.StateAxes({...: 0})))
    def same(first, second):
        assert first is second
        return second

    assert same(foo, foo) is foo


def test_trees_refuse_aliases_and_returned_arguments():
    foo = Foo()
    with pytest.raises(ValueError, match="Duplicate Param") as error:
        nnx.vmap(lambda a, b: 0.0, graph=False)(foo, [foo])
    assert ".args[0].a" in str(error.value) and ".args[1][0].a" in str(error.value)
    with pytest.raises(ValueError, match="nnx.vmap with graph_updates=False"):
        nnx.vmap(lambda foo: foo, graph=False)(foo)


def test_captured_objects_are_not_returned():
    foo = Foo()
    with pytest.raises(ValueError, match="Cannot extract graph node from different"):
        nnx.vmap(lambda x: foo)(jnp.ones(3))
    with pytest.raises(ValueError, match="Cannot return captured Variable"):
        nnx.vmap(lambda x: foo, graph_updates=False)(jnp.ones(3))


def test_variables_and_nodes_are_no_prefixes():
    with pytest.raises(ValueError, match="Variables prefixes are not supported"):
        nnx.vmap(lambda x: x, in_axes=(nnx.Param(0),))
    with pytest.raises(ValueError, match="Graph nodes are not allowed as prefixes"):
        nnx.vmap(lambda x: x, in_axes=(Foo(),))


def test_bound_methods_are_refused():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="bound methods"):
        nnx.vmap(model.__call__)


@pytest.mark.parametrize("out_axis", [0, -1])
def test_axis_names_come_and_go_with_the_axis(out_axis):
    metadata = {nnx.PARTITION_NAME: "layers"}

    @nnx.vmap(in_axes=0, out_axes=out_axis, transform_metadata=metadata)
    def make(key):
        with nnx.use_eager_sharding(False):
            return nnx.Param(jax.random.normal(key, (2,)), out_sharding=("features",))

    stack = make(jax.random.split(jax.random.key(0), 3))
    names = ("layers", "features") if out_axis == 0 else ("features", "layers")
    assert stack.out_sharding == names
    seen = []
    see = nnx.vmap(
        lambda v: seen.append(v.out_sharding),
        in_axes=out_axis,
        transform_metadata=metadata,
    )
    see(stack)
    assert seen == [("features",)] and stack.out_sharding == names


def test_pmap_runs_on_several_devices():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    x = jnp.arange(8.0 * 2).reshape(8, 1, 2)
    y = nnx.pmap(lambda model, x: model(x), in_axes=(None, 0))(model, x)
    assert len(y.devices()) == 8
    np.testing.assert_allclose(y, model(x), rtol=1e-6)


def test_nested_maps_of_a_gradient():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    x = jnp.arange(6.0).reshape(3, 2)
    gradient = nnx.grad(lambda model, x: model(x).sum())
    grads = nnx.vmap(gradient, in_axes=(None, 0))(model, x)
    np.testing.assert_array_equal(grads["kernel"][..., 0], x)
