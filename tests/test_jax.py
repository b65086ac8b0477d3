"""The door to JAX: what the package relies on holds in this version."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import graftree as nnx
from graftree import _jax
from graftree.core.variables import values


def test_token_of_a_trace_is_stable_and_dies_with_the_trace():
    tokens = []

    def f(x):
        tokens.extend([_jax.current_trace(), _jax.current_trace()])
        assert tokens[0]() is not None
        return x

    jax.jit(f)(1.0)
    gc.collect()
    assert tokens[0] is tokens[1] and tokens[0] is not _jax.current_trace()
    assert tokens[0]() is None and _jax.current_trace()() is not None


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap, jax.checkpoint])
def test_every_transform_is_a_trace_of_its_own(transform):
    outer, seen = _jax.current_trace(), []
    x = jnp.ones(2) if transform is jax.vmap else 1.0
    transform(lambda x: (seen.append(_jax.current_trace()), x)[1])(x)
    assert seen[0] is not outer and _jax.current_trace() is outer


def test_refs_are_told_from_arrays_also_when_traced():
    ref, seen = jax.new_ref(jnp.ones(2)), []
    jax.jit(lambda r, x: seen.extend([_jax.is_ref(r), _jax.is_ref(x)]))(ref, 1.0)
    assert seen == [True, False]
    assert _jax.is_ref(ref) and not _jax.is_ref(ref[...])


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap, jax.checkpoint])
def test_tracing_is_told_from_eager_execution(transform):
    seen = []
    x = jnp.ones(2) if transform is jax.vmap else 1.0
    transform(lambda x: (seen.append(_jax.is_tracing()), x)[1])(x)
    assert seen == [True] and not _jax.is_tracing()


@pytest.mark.parametrize(
    ("transform", "records"),
    [(jax.jit, True), (jax.checkpoint, True), (jax.grad, False), (jax.vmap, False)],
)
def test_what_records_a_program_is_told_from_what_does_not(transform, records):
    seen = []
    x = jnp.ones(2) if transform is jax.vmap else 1.0
    transform(lambda x: (seen.append(_jax.is_staging()), x)[1])(x)
    assert seen == [records] and not _jax.is_staging()


def test_types_of_arrays_are_known():
    for value in (jnp.ones(1), np.ones(1), jax.new_ref(jnp.ones(1))):
        assert _jax.is_data_type(type(value))
    for value in (1, np.float32(1), "x", [1]):
        assert not _jax.is_data_type(type(value))


def test_one_level_of_a_pytree_is_taken_apart():
    inner = {"x": 1}
    children, treedef = _jax.flatten_one_level({"b": inner, "a": None})
    assert [child for _, child in children] == [None, inner]
    assert treedef.unflatten([1, 2]) == {"a": 1, "b": 2}


def test_node_may_be_its_own_child():
    items = [1]
    items.append(items)
    children, _ = _jax.flatten_one_level(items)
    assert children[1][1] is items


def test_registered_types_are_pytrees():
    assert _jax.is_pytree_type(list) and not _jax.is_pytree_type(int)


def test_type_of_an_array_is_shape_dtype_and_sharding():
    a = jnp.ones(2)
    assert values.have_same_type(a, jnp.zeros(2))
    assert not values.have_same_type(a, jnp.zeros(3))
    assert not values.have_same_type(a, jnp.zeros(2, jnp.int32))
    assert not values.have_same_type(a, jax.device_put(a, jax.devices()[1]))
    seen = []
    jax.jit(lambda x: seen.append(values.have_same_type(x, a)))(a)
    assert seen == [True]


def test_copies_have_buffers_of_their_own():
    a = jnp.array(1.0)
    copied = nnx.clone(nnx.Variable(a), arrays=True).get_raw_value()
    assert copied.unsafe_buffer_pointer() != a.unsafe_buffer_pointer()
    assert copied.weak_type == a.weak_type and copied.sharding == a.sharding
    assert jax.jit(lambda x: nnx.clone(nnx.Variable(x), arrays=True)[...])(a) == 1.0


def test_formats_are_told_from_shardings():
    sharding = NamedSharding(jax.make_mesh((8,), ("x",)), P("x"))
    assert _jax.is_format(Format(Layout(major_to_minor=(0,)), sharding))
    assert not _jax.is_format(sharding)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_mesh_with_devices_is_known_inside_traces(kind):
    mesh, seen = jax.make_mesh((8,), ("x",), axis_types=(kind,)), []
    assert _jax.concrete_mesh() is None
    with jax.set_mesh(mesh):
        jax.jit(lambda x: (seen.append(_jax.concrete_mesh()), x)[1])(1.0)
        assert _jax.concrete_mesh() == seen[0] == mesh
