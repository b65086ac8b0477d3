"""Shapes and programs without values: `eval_shape`, `make_jaxpr` (section 10)."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import graftree as nnx
from tests import zoo

AXIS_TYPES = pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
Shape = jax.ShapeDtypeStruct


class Model(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones((2, 3)), tag="x")
        self.d = nnx.Variable({"x": jnp.zeros(4, jnp.int32)})
        self.array = jnp.ones(5)
        self.static = 1
        self.rngs = nnx.Rngs(0)

    def __call__(self, x):
        self.w[...] += 1
        return self.w.sum() * x


def leaves(tree):
    return jax.tree.leaves(tree)


def is_concrete(model):
    return all(type(x) is type(jnp.ones(())) for x in leaves(model))


# ------------------------------------------------------------------------ eval_shape


def test_models_have_shapes_for_arrays(mode):
    model = nnx.eval_shape(Model, **mode)
    assert isinstance(model, Model) and model.static == 1
    assert model.w.get_value() == model.w[...] == Shape((2, 3), jnp.float32)
    assert isinstance(model.w, nnx.Param) and model.w.tag == "x"
    assert model.d["x"] == Shape((4,), jnp.int32)
    assert model.array == Shape((5,), jnp.float32)
    key = model.rngs.default.key[...]
    assert key.shape == () and jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
    assert all(type(x) is Shape for x in leaves(model))
    number, nothing = nnx.eval_shape(lambda: (1, None), **mode)
    assert number == Shape((), jnp.int32, weak_type=True) and nothing is None


def test_arguments_may_be_abstract(mode):
    model = nnx.eval_shape(Model, **mode)
    out = nnx.eval_shape(Model.__call__, model, Shape((7,), jnp.float32), **mode)
    assert out == Shape((7,), jnp.float32)
    with_array = nnx.eval_shape(lambda m: m.array * 2, model, **mode)
    assert with_array == Shape((5,), jnp.float32)
    linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    assert nnx.eval_shape(linear, Shape((4, 2), jnp.float32), **mode).shape == (4, 3)
    assert all(type(x) is Shape for x in leaves(model))


def test_abstract_models_become_real_ones(mode):
    abstract, real = nnx.eval_shape(Model, **mode), Model()
    nnx.update(abstract, nnx.state(real))
    assert is_concrete(nnx.state(abstract, nnx.Param))
    assert abstract(1.0) == 12.0 and real.w.sum() == 6.0


def test_returned_arguments_are_new_objects():
    model = Model()
    out, again, w = nnx.eval_shape(lambda model: (model, model, model.w), model)
    assert out is not model and again is out and w is out.w
    assert out.w[...] == Shape((2, 3), jnp.float32) and is_concrete(model.w)


def test_refs_stay_marked_as_refs(mode):
    def make(variable=None):
        value = jnp.ones(2) if variable is None else variable[...] * 2
        return nnx.Param(value, ref=True)

    new = nnx.eval_shape(make, **mode)
    assert new.ref and new.get_raw_value() == Shape((2,), jnp.float32)
    for given in (new, nnx.Variable(jnp.ones(3), ref=True)):
        out = nnx.eval_shape(make, given, **mode)
        assert out.ref and out.get_raw_value() == Shape(given.shape, jnp.float32)


def test_refs_may_be_returned():
    variable = nnx.Variable(jnp.ones(2), ref=True)
    out = nnx.eval_shape(lambda v: v, variable)
    assert out is not variable and out.ref
    assert out.get_raw_value() == Shape((2,), jnp.float32)
    assert nnx.eval_shape(lambda v: v, out).ref


def test_objects_may_come_twice_with_graph_updates():
    def same(a, b):
        assert a is b
        return a

    model = Model()
    assert nnx.eval_shape(same, model, model).w.shape == (2, 3)


def test_an_argument_may_share_its_parts_in_graph_mode():
    def same(tied):
        assert tied.a is tied.same
        return tied.a + tied.same

    assert nnx.eval_shape(same, zoo.Tied(), graph_updates=False).shape == (2,)


def test_outputs_that_are_no_arrays_are_refused_by_jax(mode):
    with pytest.raises(TypeError, match="not a valid JAX type"):
        nnx.eval_shape(lambda: "text", **mode)


# ------------------------------------------------------------------------- shardings


def annotated(mesh=None):
    """A model of which one Variable is annotated."""
    names = {"out_sharding": ("a", None), "eager_sharding": False, "mesh": mesh}
    return zoo.Box(
        kernel=nnx.Param(jnp.ones((8, 2)), **names),
        bias=nnx.Param(jnp.ones(2)),
        pair=nnx.Variable({"x": jnp.ones(2), "y": jnp.ones(2)}),
        array=jnp.ones(2),
    )


def mesh_of(axis_type):
    kind = getattr(jax.sharding.AxisType, axis_type)
    return jax.make_mesh((8,), ("a",), axis_types=(kind,))


def spec_of(shape):
    return tuple(x for x in shape.sharding.spec if x is not None)


@AXIS_TYPES
def test_variables_are_placed_on_the_mesh(mode, axis_type):
    def make():
        return nnx.Param(jnp.ones((8, 2)), out_sharding=("a", None))

    with jax.set_mesh(mesh_of(axis_type)):
        model = nnx.eval_shape(lambda: nnx.Linear(8, 2, rngs=nnx.Rngs(0)), **mode)
        placed = nnx.eval_shape(make, **mode)
        rngs = nnx.eval_shape(lambda: nnx.Rngs(0), **mode)
        ambient = jax.sharding.get_abstract_mesh()
    assert placed[...].sharding == NamedSharding(ambient, P("a", None))
    for shape in (*leaves(model), *leaves(rngs)):
        assert shape.sharding.mesh == ambient and spec_of(shape) == ()


def test_values_of_any_structure_are_placed(mode):
    with jax.set_mesh(mesh_of("Auto")):
        model = nnx.eval_shape(annotated, **mode)
        ambient = jax.sharding.get_abstract_mesh()
    assert model.kernel[...].sharding == NamedSharding(ambient, P("a", None))
    replicated = NamedSharding(ambient, P())
    assert [x.sharding for x in leaves(model.pair)] == [replicated] * 2
    assert model.array.sharding is None


def test_a_mesh_in_the_metadata_counts(mode):
    mesh = mesh_of("Auto")
    model = nnx.eval_shape(lambda: annotated(mesh), **mode)
    assert model.kernel[...].sharding == NamedSharding(mesh, P("a", None))
    assert model.bias[...].sharding is None


def test_without_a_mesh_there_are_no_shardings(mode):
    assert all(x.sharding is None for x in leaves(nnx.eval_shape(annotated, **mode)))


def test_as_abstract_places_what_is_annotated(graph):
    model, concrete = nnx.eval_shape(annotated), annotated()
    with jax.set_mesh(mesh_of("Auto")):
        placed = nnx.as_abstract(model, graph)
        state = nnx.as_abstract(nnx.state(model), graph)
        same = nnx.as_abstract(concrete, graph)
        ambient = jax.sharding.get_abstract_mesh()
    sharding = NamedSharding(ambient, P("a", None))
    assert placed.kernel[...].sharding == state["kernel"][...].sharding == sharding
    assert placed is not model and placed.kernel is not model.kernel
    assert placed.bias is model.bias and placed.pair is model.pair
    assert model.kernel[...].sharding is None
    unplaced = nnx.as_abstract(model, graph)
    assert unplaced is not model and unplaced.kernel is model.kernel
    assert same is not concrete and same.kernel is concrete.kernel


def test_older_name_of_as_abstract_warns():
    for older in (nnx.abstract_with_sharding, nnx.spmd.abstract_with_sharding):
        with pytest.warns(DeprecationWarning, match="as_abstract"):
            assert older({"x": 1}) == {"x": 1}


@AXIS_TYPES
def test_abstract_models_are_on_the_mesh_itself(axis_type, graph):
    mesh = mesh_of(axis_type)
    graphdef, state = nnx.get_abstract_model(annotated, mesh, graph=graph)
    shapes = {path: x.sharding for path, x in jax.tree.leaves_with_path(state)}
    for path, sharding in shapes.items():
        spec = P("a", None) if "kernel" in jax.tree_util.keystr(path) else P()
        assert sharding == NamedSharding(mesh, spec)
    assert isinstance(nnx.merge(graphdef, state), zoo.Box)
    assert all(type(x) is Shape for x in leaves(state))


def test_abstract_models_have_shared_variables_once():
    def make():
        model = annotated()
        model.tied = model.kernel
        return model

    _, state = nnx.compat.get_abstract_model(make, mesh_of("Auto"))
    assert set(state) == {"array", "bias", "kernel", "pair"}


# ------------------------------------------------------------------------ make_jaxpr


def test_jaxprs_are_those_of_jax(value_mode):
    def f(model, x, *, y):
        model.w[...] += 1
        return model.w * x + y

    model = nnx.Dict(w=nnx.Param(jnp.ones(2)))
    jaxpr = nnx.make_jaxpr(f, **value_mode)(model, 2.0, y=3.0)
    expected = jax.make_jaxpr(lambda w, x, y: (w + 1) * x + y)(jnp.ones(2), 2.0, 3.0)
    assert str(jaxpr) == str(expected) and type(jaxpr) is type(expected)
    assert model.w[...].tolist() == [1.0, 1.0]
    assert nnx.make_jaxpr(f, **value_mode).__name__ == "f"


def test_jaxprs_of_abstract_and_static_arguments(value_mode):
    @nnx.make_jaxpr(static_argnums=1, **value_mode)
    def f(model, n, x):
        assert n == 3
        return model(x) ** n

    jaxpr = f(nnx.eval_shape(Model, **value_mode), 3, Shape((7,), jnp.float32))
    assert [x.shape for x in jaxpr.out_avals] == [(7,)]


def test_graph_updates_are_refused_when_the_function_is_given():
    decorator = nnx.make_jaxpr(static_argnums=1)
    with pytest.raises(ValueError, match="make_jaxpr does not support graph_updates=T"):
        decorator(lambda x: x)
    with nnx.set_graph_updates(False):
        assert len(decorator(lambda x, n: x)(1.0, 2).in_avals) == 1


def test_jaxprs_take_an_alias_once_in_graph_mode():
    variable = nnx.Param(jnp.ones(2))
    f = nnx.make_jaxpr(lambda a, b: a + b, graph_updates=False)
    assert len(f(variable, variable).in_avals) == 1
    with pytest.raises(ValueError, match="nnx.make_jaxpr with graph_up") as error:
        nnx.make_jaxpr(lambda a, b: a, graph=False)(variable, variable)
    assert "graph_updates=True" not in str(error.value)


def test_jaxprs_do_not_return_arguments(value_mode):
    with pytest.raises(ValueError, match="Duplicate Param"):
        nnx.make_jaxpr(lambda v: v, **value_mode)(nnx.Param(1.0))
    captured = nnx.Param(jnp.ones(2))
    with pytest.raises(ValueError, match="Cannot return captured Variable"):
        nnx.make_jaxpr(lambda: captured, **value_mode)()


# ---------------------------------------------------------- jax.eval_shape over models


def test_issue_4520_jax_eval_shape_leaves_no_tracers_in_the_model(mode):
    @nnx.split_rngs(splits=2, **mode)
    @nnx.vmap(**mode)
    def layers(rngs):
        return nnx.Linear(4, 4, rngs=rngs)

    @nnx.scan(out_axes=nnx.Carry, **mode)
    def through(x, layer):
        return layer(x)

    def forward(model, x):
        return through(model.stem(x), model.layers)

    rngs = nnx.Rngs(0)
    model = zoo.Box(stem=nnx.Linear(3, 4, rngs=rngs), layers=layers(rngs))
    before = leaves(model)
    for eval_shape in (jax.eval_shape, functools.partial(nnx.eval_shape, **mode)):
        x = Shape((6, 3), jnp.float32)
        assert eval_shape(forward, model, x).shape == (6, 4)
        assert all(a is b for a, b in zip(leaves(model), before, strict=True))
    assert forward(model, jnp.ones((6, 3))).shape == (6, 4)
