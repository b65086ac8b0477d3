"""Shapes and programs without values: `eval_shape`, `make_jaxpr` (section 10)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import graftree as nnx

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
    return all(
        isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
        for x in leaves(model)
    )


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


def test_attributes_made_inside_hold_no_tracers(mode):
    def make(model, x):
        new = nnx.Dict(raw=x * 2, variable=nnx.Param(x))
        new.later = x + 1
        return new, {"x": x, "n": 1, "none": None}

    new, out = nnx.eval_shape(make, Model(), jnp.ones(3), **mode)
    assert new.raw == new.variable[...] == new.later == Shape((3,), jnp.float32)
    assert out["n"].dtype == jnp.int32 and out["none"] is None
    assert all(type(x) is Shape for x in leaves((new, out)))


def test_arguments_are_never_changed(mode):
    model, variable = Model(), nnx.Variable(jnp.ones(2), ref=True)
    before = jax.tree.map(jnp.asarray, nnx.state(model, nnx.Param))

    def write(model, variable, *, scale):
        model(scale)
        model.rngs.normal(())
        model.w.set_metadata(tag="y")
        model.new = nnx.Param(jnp.zeros(1))
        variable[...] *= 2
        return model.w * scale

    out = nnx.eval_shape(write, model, variable, scale=2.0, **mode)
    assert out == Shape((2, 3), jnp.float32)
    assert model.w.tag == "x" and not hasattr(model, "new")
    assert model.rngs.default.count[...] == 0 and is_concrete(nnx.state(model))
    assert (model.w[...] == before["w"][...]).all()
    assert variable[...].tolist() == [1.0, 1.0]


def test_arguments_may_be_abstract(mode):
    model = nnx.eval_shape(Model, **mode)
    out = nnx.eval_shape(Model.__call__, model, Shape((7,), jnp.float32), **mode)
    assert out == Shape((7,), jnp.float32)
    with_array = nnx.eval_shape(lambda m: m.array * 2, model, **mode)
    assert with_array == Shape((5,), jnp.float32)
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


def test_captured_objects_are_returned_as_new_objects():
    model = Model()
    out = nnx.eval_shape(lambda: model)
    assert out is not model and out.w is not model.w
    assert out.w[...] == Shape((2, 3), jnp.float32) and is_concrete(model.w)


def test_captured_objects_are_read_not_written(mode):
    model = Model()
    out = nnx.eval_shape(lambda x: model.w * x, 2.0, **mode)
    assert out == Shape((2, 3), jnp.float32)
    with pytest.raises(nnx.errors.TraceContextError, match="Cannot mutate Param"):
        nnx.eval_shape(lambda x: model(x), 2.0, **mode)
    assert is_concrete(model.w) and model.w.sum() == 6.0
    linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    assert nnx.eval_shape(linear, Shape((4, 2), jnp.float32), **mode).shape == (4, 3)


def test_works_inside_other_traces(mode):
    model = Model()

    @jax.jit
    def f(x):
        shape = nnx.eval_shape(Model.__call__, model, x, **mode).shape
        return jnp.zeros(shape)

    assert f(jnp.ones(3)).shape == (3,) and is_concrete(model.w)


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


# ----------------------------------------------------------------- errors of aliases


def test_a_variable_in_two_arguments_is_refused_without_graph_updates(value_mode):
    model = nnx.Dict(w=nnx.Param(jnp.ones(2)))
    pairs = {
        "  - .args[0].w\n  - .args[1][0].w": ((model, [model]), {}),
        "  - .args[0]\n  - .args[1].w": ((model.w, model), {}),
        "  - .args[0].w\n  - .kwargs['b']": ((model,), {"b": model.w}),
    }
    for text, (args, kwargs) in pairs.items():
        with pytest.raises(ValueError, match="Duplicate Param") as error:
            nnx.eval_shape(lambda a, b: 0.0, *args, **kwargs, **value_mode)
        assert text in str(error.value)
        assert "nnx.eval_shape with graph_updates=False" in str(error.value)


def test_aliases_are_kept_with_graph_updates():
    model = Model()

    def same(a, b):
        assert a is b
        return a

    assert nnx.eval_shape(same, model, model).w.shape == (2, 3)


def test_aliases_inside_one_argument_are_kept_in_graph_mode():
    tied = nnx.Dict(a=nnx.Param(jnp.ones(2)))
    tied.b = tied.a

    def same(tied):
        assert tied.a is tied.b
        return tied.a + tied.b

    assert nnx.eval_shape(same, tied, graph_updates=False).shape == (2,)
    with pytest.raises(ValueError, match="Duplicate Param"):
        nnx.eval_shape(same, tied, graph=False)


def test_returned_arguments_are_refused_without_graph_updates(value_mode):
    phrase = r"(?s)Duplicate.*\.args\[0\]\.\w\n  - \.out\.\w\n.*nnx\.eval_shape with"
    with pytest.raises(ValueError, match=phrase):
        nnx.eval_shape(lambda model: model, Model(), **value_mode)
    model = Model()
    with pytest.raises(ValueError, match="Cannot return captured Variable"):
        nnx.eval_shape(lambda: model, **value_mode)


def test_outputs_that_are_no_arrays_are_refused_by_jax(mode):
    with pytest.raises(TypeError, match="not a valid JAX type"):
        nnx.eval_shape(lambda: "text", **mode)


# ------------------------------------------------------------------------- shardings


class Annotated(nnx.Module):
    def __init__(self, mesh=None):
        self.kernel = nnx.Param(
            jnp.ones((8, 2)), out_sharding=("a", None), eager_sharding=False, mesh=mesh
        )
        self.bias = nnx.Param(jnp.ones(2))
        self.pair = nnx.Variable({"x": jnp.ones(2), "y": jnp.ones(2)})
        self.array = jnp.ones(2)


def mesh_of(axis_type):
    kind = getattr(jax.sharding.AxisType, axis_type)
    return jax.make_mesh((8,), ("a",), axis_types=(kind,))


def spec_of(shape):
    return tuple(x for x in shape.sharding.spec if x is not None)


@AXIS_TYPES
def test_variables_are_placed_on_the_mesh(mode, axis_type):
    with jax.set_mesh(mesh_of(axis_type)):
        model = nnx.eval_shape(lambda: nnx.Linear(8, 2, rngs=nnx.Rngs(0)), **mode)
        annotated = nnx.eval_shape(
            lambda: nnx.Param(jnp.ones((8, 2)), out_sharding=("a", None)), **mode
        )
        rngs = nnx.eval_shape(lambda: nnx.Rngs(0), **mode)
        ambient = jax.sharding.get_abstract_mesh()
    assert annotated[...].sharding == NamedSharding(ambient, P("a", None))
    for shape in (*leaves(model), *leaves(rngs)):
        assert shape.sharding.mesh == ambient and spec_of(shape) == ()


def test_values_of_any_structure_are_placed(mode):
    with jax.set_mesh(mesh_of("Auto")):
        model = nnx.eval_shape(Annotated, **mode)
        ambient = jax.sharding.get_abstract_mesh()
    assert model.kernel[...].sharding == NamedSharding(ambient, P("a", None))
    replicated = NamedSharding(ambient, P())
    assert [x.sharding for x in leaves(model.pair)] == [replicated] * 2
    assert model.array.sharding is None


def test_a_mesh_in_the_metadata_counts(mode):
    mesh = mesh_of("Auto")
    model = nnx.eval_shape(lambda: Annotated(mesh), **mode)
    assert model.kernel[...].sharding == NamedSharding(mesh, P("a", None))
    assert model.bias[...].sharding is None


def test_without_a_mesh_there_are_no_shardings(mode):
    assert all(x.sharding is None for x in leaves(nnx.eval_shape(Annotated, **mode)))


def test_as_abstract_places_what_is_annotated(graph):
    model = nnx.eval_shape(Annotated)
    with jax.set_mesh(mesh_of("Auto")):
        placed = nnx.as_abstract(model, graph)
        state = nnx.as_abstract(nnx.state(model), graph)
        ambient = jax.sharding.get_abstract_mesh()
    sharding = NamedSharding(ambient, P("a", None))
    assert placed.kernel[...].sharding == state["kernel"][...].sharding == sharding
    assert placed is not model and placed.kernel is not model.kernel
    assert placed.bias is model.bias and placed.pair is model.pair
    assert model.kernel[...].sharding is None
    unplaced = nnx.as_abstract(model, graph)
    assert unplaced is not model and unplaced.kernel is model.kernel


def test_as_abstract_leaves_concrete_models():
    model = Annotated()
    with jax.set_mesh(mesh_of("Auto")):
        out = nnx.as_abstract(model)
    assert out is not model and out.kernel is model.kernel


def test_older_name_of_as_abstract_warns():
    for older in (nnx.abstract_with_sharding, nnx.spmd.abstract_with_sharding):
        with pytest.warns(DeprecationWarning, match="as_abstract"):
            assert older({"x": 1}) == {"x": 1}


@AXIS_TYPES
def test_abstract_models_are_on_the_mesh_itself(axis_type, graph):
    mesh = mesh_of(axis_type)
    graphdef, state = nnx.get_abstract_model(Annotated, mesh, graph=graph)
    shapes = {path: x.sharding for path, x in jax.tree.leaves_with_path(state)}
    for path, sharding in shapes.items():
        spec = P("a", None) if "kernel" in jax.tree_util.keystr(path) else P()
        assert sharding == NamedSharding(mesh, spec)
    assert isinstance(nnx.merge(graphdef, state), Annotated)
    assert all(type(x) is Shape for x in leaves(state))


def test_abstract_models_have_shared_variables_once():
    def make():
        model = Annotated()
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


def test_jaxprs_of_abstract_arguments(value_mode):
    model = nnx.eval_shape(Model, **value_mode)
    jaxpr = nnx.make_jaxpr(Model.__call__, **value_mode)(
        model, Shape((7,), jnp.float32)
    )
    assert [x.shape for x in jaxpr.out_avals] == [(7,)]


def test_static_arguments_are_not_traced(value_mode):
    @nnx.make_jaxpr(static_argnums=(1,), **value_mode)
    def f(x, n, y):
        return x**n + y if n == 3 else y

    assert len(f(2.0, 3, 1.0).in_avals) == 2


def test_graph_updates_are_refused_when_the_function_is_given():
    phrase = r"nnx\.make_jaxpr does not support graph_updates=True\."
    with pytest.raises(ValueError, match=phrase):
        nnx.make_jaxpr(lambda x: x)
    decorator = nnx.make_jaxpr(static_argnums=1)
    with pytest.raises(ValueError, match=phrase):
        decorator(lambda x: x)
    with nnx.set_graph_updates(False):
        assert len(decorator(lambda x, n: x)(1.0, 2).in_avals) == 1


def test_jaxprs_with_aliases_in_graph_mode():
    model = nnx.Param(jnp.ones(2))
    f = nnx.make_jaxpr(lambda a, b: a + b, graph_updates=False)
    assert len(f(model, model).in_avals) == 1
    with pytest.raises(ValueError, match=r"(?s)args\[0\]\n  - .args\[1\]") as error:
        nnx.make_jaxpr(lambda a, b: a, graph=False)(model, model)
    assert "nnx.make_jaxpr with graph_updates=False does" in str(error.value)
    assert "graph_updates=True" not in str(error.value)


def test_jaxprs_do_not_return_arguments(value_mode):
    with pytest.raises(ValueError, match="Duplicate Param"):
        nnx.make_jaxpr(lambda v: v, **value_mode)(nnx.Param(1.0))
    captured = nnx.Param(jnp.ones(2))
    with pytest.raises(ValueError, match="Cannot return captured Variable"):
        nnx.make_jaxpr(lambda: captured, **value_mode)()


# ---------------------------------------------------------- jax.eval_shape over models


def test_issue_4520_jax_eval_shape_leaves_no_tracers_in_the_model(mode):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.stem = nnx.Linear(3, 4, rngs=rngs)

            @nnx.split_rngs(splits=2, **mode)
            @nnx.vmap(in_axes=(0,), out_axes=0, **mode)
            def create_block(rngs):
                return nnx.Linear(4, 4, rngs=rngs)

            self.backbone = create_block(rngs)
            self.head = nnx.Linear(4, 5, rngs=rngs)

        def __call__(self, x):
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, **mode)
            def forward(x, block):
                return block(x)

            return self.head(forward(self.stem(x), self.backbone))

    model = Net(nnx.Rngs(0))
    before = dict(jax.tree.leaves_with_path(nnx.state(model)))
    for eval_shape in (jax.eval_shape, functools.partial(nnx.eval_shape, **mode)):
        assert eval_shape(model, Shape((6, 3), jnp.float32)).shape == (6, 5)
        after = dict(jax.tree.leaves_with_path(nnx.state(model)))
        assert all(after[path] is x for path, x in before.items())
    np.testing.assert_allclose(model(jnp.ones((6, 3))).shape, (6, 5))
