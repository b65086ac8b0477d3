"""Shapes and programs without values, and `checkify` (contract, section 10)."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify
from jax.sharding import NamedSharding, PartitionSpec as P

import graftree as nnx
from tests import meshes, zoo

AXIS_TYPES = pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])


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


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def leaves(tree):
    return jax.tree.leaves(tree)


def kinds(tree):
    return {type(x) for x in leaves(tree)}


ABSTRACT, CONCRETE = {jax.ShapeDtypeStruct}, {type(jnp.ones(()))}


# ------------------------------------------------------------------------ eval_shape


def test_models_have_shapes_for_arrays(mode):
    model = nnx.eval_shape(Model, **mode)
    assert isinstance(model, Model) and model.static == 1
    assert model.w.get_value() == model.w[...] == shape(2, 3)
    assert isinstance(model.w, nnx.Param) and model.w.tag == "x"
    assert model.d["x"] == shape(4, dtype=jnp.int32) and model.array == shape(5)
    key = model.rngs.default.key[...]
    assert key.shape == () and jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
    assert kinds(model) == ABSTRACT
    number, nothing = nnx.eval_shape(lambda: (1, None), **mode)
    assert nothing is None
    assert number == jax.ShapeDtypeStruct((), jnp.int32, weak_type=True)


def test_arguments_may_be_abstract(mode):
    model = nnx.eval_shape(Model, **mode)
    assert nnx.eval_shape(Model.__call__, model, shape(7), **mode) == shape(7)
    assert nnx.eval_shape(lambda m: m.array * 2, model, **mode) == shape(5)
    assert nnx.eval_shape(zoo.Scale(), shape(4), **mode) == shape(4)
    assert kinds(model) == ABSTRACT


def test_refs_stay_marked_as_refs(mode):
    def make(variable=None):
        value = jnp.ones(2) if variable is None else variable[...] * 2
        return nnx.Param(value, ref=True)

    new = nnx.eval_shape(make, **mode)
    assert new.ref and new.get_raw_value() == shape(2)
    for given in (new, nnx.Variable(jnp.ones(3), ref=True)):
        out = nnx.eval_shape(make, given, **mode)
        assert out.ref and out.get_raw_value() == shape(*given.shape)


def test_an_argument_may_share_its_parts_in_graph_mode():
    def same(tied):
        assert tied.a is tied.same
        return tied.a + tied.same

    assert nnx.eval_shape(same, zoo.Tied(), graph_updates=False).shape == (2,)


def test_a_variable_and_its_ref_may_both_be_arguments(mode):
    scale = nnx.Param(jnp.ones(3), ref=True)
    out = nnx.eval_shape(lambda v, x: v + x[...], scale, scale.get_raw_value(), **mode)
    assert out == shape(3)


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


@AXIS_TYPES
def test_variables_are_placed_on_the_mesh(mode, axis_type):
    def make():
        placed = nnx.Param(jnp.ones((8, 2)), out_sharding=("a", None))
        return placed, nnx.Linear(8, 2, rngs=nnx.Rngs(0)), nnx.Rngs(0)

    with jax.set_mesh(meshes.mesh_of(axis_type, a=8)):
        placed, *others = nnx.eval_shape(make, **mode)
        ambient = jax.sharding.get_abstract_mesh()
    assert placed[...].sharding == NamedSharding(ambient, P("a", None))
    for x in leaves(others):
        assert x.sharding.mesh == ambient and {*x.sharding.spec} <= {None}


def test_values_are_placed_on_the_mesh_in_force_or_that_of_their_metadata(mode):
    mesh = meshes.mesh_of(a=8)
    with jax.set_mesh(mesh):
        model = nnx.eval_shape(annotated, **mode)
        ambient = jax.sharding.get_abstract_mesh()
    assert model.kernel[...].sharding == NamedSharding(ambient, P("a", None))
    replicated = NamedSharding(ambient, P())
    assert [x.sharding for x in leaves(model.pair)] == [replicated] * 2
    assert model.array.sharding is None
    model = nnx.eval_shape(lambda: annotated(mesh), **mode)
    assert model.kernel[...].sharding == NamedSharding(mesh, P("a", None))
    assert model.bias[...].sharding is None
    assert all(x.sharding is None for x in leaves(nnx.eval_shape(annotated, **mode)))


def test_as_abstract_places_what_is_annotated(graph):
    model, concrete = nnx.eval_shape(annotated), annotated()
    with jax.set_mesh(meshes.mesh_of(a=8)):
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
    for older in (nnx.abstract_with_sharding, nnx.spmd.abstract_with_sharding):
        with pytest.warns(DeprecationWarning, match="as_abstract"):
            assert older({"x": 1}) == {"x": 1}


@AXIS_TYPES
def test_abstract_models_are_on_the_mesh_itself(axis_type, graph):
    mesh = meshes.mesh_of(axis_type, a=8)
    graphdef, state = nnx.get_abstract_model(annotated, mesh, graph=graph)
    for path, x in jax.tree.leaves_with_path(state):
        spec = P("a", None) if "kernel" in jax.tree_util.keystr(path) else P()
        assert x.sharding == NamedSharding(mesh, spec)
    assert isinstance(nnx.merge(graphdef, state), zoo.Box)
    assert kinds(state) == ABSTRACT


def test_abstract_models_have_shared_variables_once():
    def make():
        model = annotated()
        model.tied = model.kernel
        return model

    _, state = nnx.compat.get_abstract_model(make, meshes.mesh_of(a=8))
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

    jaxpr = f(nnx.eval_shape(Model, **value_mode), 3, shape(7))
    assert [x.shape for x in jaxpr.out_avals] == [(7,)]


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


# ----------------------------------------------------------------------------- checkify


def scale(model, x):
    checkify.check(jnp.array(x) > 0, "x must be positive, got {x}", x=jnp.array(x))
    model.w[...] *= 2
    return model.w * x


def check_passes(f, *args, **kwargs):
    model = zoo.Scale(2.0)
    error, out = f(model, *args, **kwargs)
    assert error.get() is None and out == 12.0 and model.w[...] == 4.0
    error.throw()


def test_passed_checks_give_no_error(mode):
    check_passes(nnx.checkify(scale, **mode), 3.0)


def test_modes_are_positional_and_keywords_are_taken_with_graph_updates():
    check_passes(nnx.checkify(scale, checkify.user_checks, True, False), 3.0)
    check_passes(nnx.checkify(scale), x=3.0)
    assert nnx.checkify(lambda *, x: x)(x=1.0)[1] == 1.0


@pytest.mark.parametrize("place", ["outside", "inside jit", "around jit"])
def test_updates_propagate_with_the_error(place, mode):
    function = nnx.jit(scale, **mode) if place == "around jit" else scale
    function = nnx.checkify(function, **mode)
    function = nnx.jit(function, **mode) if place == "inside jit" else function
    model = zoo.Scale(2.0)
    error, out = function(model, -3.0)
    assert out == -12.0 and model.w[...] == 4.0
    assert "x must be positive, got -3" in error.get()
    with pytest.raises(ValueError, match="x must be positive"):
        error.throw()


def test_errors_say_what_is_checked(mode):
    infinite = nnx.Variable(jnp.array(jnp.inf))

    def error(*checks):
        return nnx.checkify(lambda v: jnp.sin(v[...]), *checks, **mode)(infinite)[0]

    with pytest.raises(ValueError, match="nan generated by primitive: sin"):
        error(checkify.float_checks).throw()
    error().throw()
