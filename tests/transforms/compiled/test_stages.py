"""Traced, lowered, compiled: the stages of `jit` (contract, 6); `jax.export`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import graftree as nnx
from tests import meshes, modes, tables, zoo

X = np.ones(2, np.float32)


def scale(value=1.0):
    return zoo.Box(w=nnx.Param(jnp.full(2, value)), k=1)


def step(model, x):
    model.w[...] += x
    return {"y": model.w * x, "new": nnx.Param(x)}


@functools.cache
def lowered_in(**mode):
    """The lowered `step` in a mode."""
    return nnx.jit(step, **mode).lower(scale(), X)


@functools.cache
def compiled_in(**mode):
    """The compiled `step` in a mode."""
    return lowered_in(**mode).compile()


@pytest.fixture(params=["trace", "lower", "compile"])
def stage(request):
    """Makes a stage of a jitted function."""

    def make(jitted, *args, **kwargs):
        if request.param == "trace":
            return jitted.trace(*args, **kwargs)
        lowered = jitted.lower(*args, **kwargs)
        return lowered if request.param == "lower" else lowered.compile()

    return make


# --------------------------------------------------------- shapes instead of arrays


def abstract(x):
    """The same with ``jax.ShapeDtypeStruct`` in the place of arrays."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), x)


@pytest.mark.parametrize("make", [lambda: abstract(scale()), None])
def test_shapes_stand_for_arrays(make, mode):
    model = make() if make else nnx.eval_shape(scale, **mode)
    lowered = nnx.jit(step, **mode).lower(model, abstract(X))
    assert "stablehlo.add" in lowered.as_text()
    assert isinstance(model.w.get_value(), jax.ShapeDtypeStruct)
    concrete = scale()
    out = lowered.compile()(concrete, np.full(2, 2.0, np.float32))
    assert out["y"].tolist() == [6.0, 6.0] and concrete.w[...].tolist() == [3.0, 3.0]


def test_eval_shape_gives_the_output_of_the_user(mode):
    out = nnx.jit(step, **mode).eval_shape(scale(), X)
    assert set(out) == {"y", "new"} and type(out["new"]) is nnx.Param
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert out["y"] == out["new"].get_value() == shape


def test_eval_shape_of_a_returned_argument_is_a_new_object_with_what_changed():
    def grow(model):
        model.k, model.new = 2, nnx.Param(jnp.ones(3))
        model.w[...] = jnp.zeros(2)
        return [model, model.w]

    model = scale()
    out, w = nnx.jit(grow).eval_shape(model)
    assert out is not model and w is out.w
    assert isinstance(w.get_value(), jax.ShapeDtypeStruct)
    assert out.k == 2 and out.new.shape == (3,)
    assert model.k == 1 and not hasattr(model, "new")


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_returned_arguments_are_described_as_new_arrays_are(kind):
    mesh = meshes.mesh_of(kind, x=2)
    rows = jax.NamedSharding(mesh, jax.P("x"))
    with jax.set_mesh(mesh):
        variable = nnx.Param(jax.device_put(jnp.ones(4), rows))
        returned, new = nnx.jit(lambda v: (v, v[...])).eval_shape(variable)
    assert returned.get_value() == new and (new.sharding is None) is (kind == "Auto")


def test_eval_shape_refuses_what_the_call_refuses(value_mode):
    with pytest.raises(ValueError, match=r"Duplicate Param[\s\S]*nnx\.jit"):
        nnx.jit(lambda m: m, **value_mode).eval_shape(scale())


def test_stages_share_their_trace_with_the_call(mode):
    traces = []
    jitted = nnx.jit(lambda m, x: traces.append(None) or step(m, x), **mode)
    model = scale()
    jitted.eval_shape(model, X)
    jitted.lower(model, X)
    jitted(model, X)
    assert len(traces) == 1


# ------------------------------------------------------------------ compiled calls


def test_compiled_function_takes_keywords_and_leaves_static_arguments_out(mode):
    def f(n, model, *, x, m):
        model.w[...] += n * x + m

    jitted = nnx.jit(f, static_argnums=0, static_argnames="m", **mode)
    model = scale()
    compiled = jitted.lower(2, model, x=X, m=1).compile()
    compiled(model, x=3 * X)
    assert model.w[...].tolist() == [8.0, 8.0]
    with pytest.raises(TypeError, match=r"(?s)does not match.*kwargs\['m'\]: nothing"):
        compiled(model, x=X, m=5)  # it would go on with that it was compiled for


@tables.cases(
    "change, says",
    (lambda m: setattr(m, "new", nnx.Param(jnp.ones(1))), r"args\[0\].new"),
    (lambda m: delattr(m, "w"), r"args\[0\].w: a Param.*compiled, nothing now"),
    (lambda m: setattr(m, "k", 2), "(?s)(k: 1|k=1).*when compiled.*(2|k=2).*now"),
    (lambda m: m.w.set_metadata(tag="x"), "metadata"),
)
def test_other_structure_is_refused(change, says, mode):
    model = scale()
    change(model)
    with pytest.raises(TypeError, match="input pytree does not match") as error:
        compiled_in(**mode)(model, X)
    assert error.match(says)


def test_shared_references_are_part_of_the_structure():
    model = scale()
    compiled = nnx.jit(lambda a, b: a.w + b.w).lower(scale(), scale()).compile()
    with pytest.raises(TypeError, match=r"args\[1\]:.*, a known object: args\[0\] now"):
        compiled(model, model)
    jitted = nnx.jit(lambda a, b: None, **modes.TREE)
    compiled = jitted.lower(scale(), scale()).compile()
    with pytest.raises(ValueError, match="Duplicate Param"):
        compiled(model, model)


# ----------------------------------------------------------------------- what they tell


def test_arguments_and_output_are_those_of_the_user(stage, mode):
    args = (scale(), X)
    made = stage(nnx.jit(step, donate_argnums=0, **mode), *args)
    (model, x), kwargs = made.args_info
    assert type(model) is zoo.Box and model.k == 1 and kwargs == {}
    info = model.w.get_value()
    assert (info.shape, info.dtype, info.donated) == ((2,), jnp.float32, True)
    assert not x.donated and made.donate_argnums == (0,)
    assert made.in_tree == jax.tree.structure((args, {}))
    assert made.in_avals[0][1].shape == (2,)
    assert made.out_tree == jax.tree.structure(step(*args))
    assert made.out_info["new"].get_value().shape == (2,)
    assert "ArgInfo" in repr(made.args_info)
    seen = jax.tree.leaves((made.args_info, made.in_avals, made.out_info))
    assert seen and not any(isinstance(x, jax.core.Tracer) for x in seen)


def test_stages_of_trees_tell_what_jax_tells(stage):
    """The arguments are pytrees there, so ``jax.jit`` takes them, too."""

    def f(model, x, *, y):
        return model.w * x, y

    args, kwargs = (scale(), X), {"y": np.ones(3, np.float32)}
    ours = stage(nnx.jit(f, donate_argnums=1, **modes.TREE), *args, **kwargs)
    theirs = stage(jax.jit(f, donate_argnums=1), *args, **kwargs)
    for name in ("in_tree", "out_tree", "donate_argnums"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert jax.tree.leaves(ours.in_avals) == jax.tree.leaves(theirs.in_avals)
    assert jax.tree.leaves(ours.out_info) == jax.tree.leaves(theirs.out_info)


def test_traced_function_shows_its_jaxpr(mode):
    traced = nnx.jit(step, **mode).trace(scale(), X)
    assert str(traced.jaxpr).count(" add ") == 1 and traced.fun_name == "step"
    lowered = traced.lower(lowering_platforms=("cpu",))
    assert isinstance(lowered, nnx.transforms.compilation.Lowered)


def test_lowered_function_shows_its_text(mode):
    lowered = lowered_in(**mode)
    assert "stablehlo.add" in lowered.as_text(dialect="stablehlo")
    assert 'loc("model.w")' in lowered.as_text(debug_info=True)
    assert lowered.compiler_ir(dialect="stablehlo") is not None
    assert lowered.cost_analysis()["flops"] >= 4
    assert lowered.compile({"xla_embed_ir_in_executable": True}) is not None


def test_compiled_function_shows_what_the_compiler_knows(mode):
    compiled = compiled_in(**mode)
    assert "add" in compiled.as_text()
    assert compiled.cost_analysis()["flops"] >= 4
    assert compiled.memory_analysis().argument_size_in_bytes == 16
    assert compiled.runtime_executable() is not None
    (given, _), _ = compiled.input_shardings
    (laid_out, _), _ = compiled.input_layouts
    shardings = compiled.output_shardings
    for sharding in (
        given.w.get_value(),
        laid_out.w.get_value().sharding,
        shardings["y"],
        shardings["new"].get_value(),
        compiled.output_formats["y"].sharding,
    ):
        assert sharding.device_set == {jax.devices()[0]}


def test_shardings_of_a_returned_argument_are_known():
    model, _ = nnx.jit(lambda m: (m, m.w * 2)).lower(scale()).compile().output_shardings
    assert model.w.get_value().device_set == {jax.devices()[0]}


def test_graph_with_a_cycle_has_stages():
    model = scale()
    model.me = nnx.data(model)
    compiled = nnx.jit(lambda m: m.me.me.w * 2).lower(model).compile()
    np.testing.assert_array_equal(compiled(model), [2.0, 2.0])
    (found,), _ = compiled.args_info
    assert found.me is found and compiled.donate_argnums == ()


# --------------------------------------------------------------------------- jax.export


BATCH = jax.ShapeDtypeStruct(export.symbolic_shape("b, 2"), jnp.float32)


def counted():
    count = nnx.Variable(jnp.array(0))
    return zoo.Box(w=nnx.Param(jnp.array([2.0, 3.0])), count=count)


def predict(model, x):
    return {"y": model.w[None] * x}


def test_exported_function_is_that_of_the_user(mode):
    model = counted()
    exported = export.export(nnx.jit(predict, **mode))(model, BATCH)
    assert exported.fun_name == "predict"
    assert exported.in_tree == jax.tree.structure(((model, 0), {}))
    assert exported.out_tree == jax.tree.structure({"y": 0})
    for batch in (1, 4):
        out = exported.call(model, jnp.ones((batch, 2)))
        np.testing.assert_array_equal(out["y"], [[2.0, 3.0]] * batch)


def test_model_that_the_function_holds_is_in_the_export(mode):
    model = counted()
    exported = export.export(nnx.jit(lambda x: predict(model, x), **mode))(BATCH)
    assert [aval.shape[1:] for aval in exported.in_avals] == [(2,)]
    np.testing.assert_array_equal(exported.call(jnp.ones((1, 2)))["y"], [[2.0, 3.0]])


def test_exported_function_has_derivatives(mode):
    model = counted()
    exported = export.export(nnx.jit(predict, **mode))(model, jnp.ones((1, 2)))

    def loss(model):
        return exported.call(model, jnp.array([[5.0, 7.0]]))["y"].sum()

    np.testing.assert_array_equal(jax.grad(loss, allow_int=True)(model).w, [5.0, 7.0])


def test_static_arguments_are_left_out(mode):
    def f(n, model, *, x, m):
        return n * model.w * x + m

    jitted = nnx.jit(f, static_argnums=0, static_argnames="m", **mode)
    model = counted()
    exported = export.export(jitted)(2, model, x=jnp.ones(2), m=1.0)
    np.testing.assert_array_equal(exported.call(model, x=jnp.ones(2)), [5.0, 7.0])


@tables.cases(
    "change, says",
    (lambda m: m.count.set_value(m.count[...] + 1), r"args\[0\].count changes"),
    (lambda m: m.w.set_metadata(tag="x"), r"args\[0\].w changes"),
)
def test_function_that_changes_its_arguments_is_refused(change, says, mode):
    def step(model):
        change(model)
        return model.w * 2

    model = counted()
    says = rf"step changes its arguments(?s:.*){says}(?s:.*)model\.eval"
    with pytest.raises(ValueError, match=says):
        export.export(nnx.jit(step, **mode))(model)
    assert model.count[...] == 0


def test_function_that_draws_is_told_to_take_a_key(mode):
    rngs = nnx.Rngs(0)
    with pytest.raises(ValueError, match=r"noise on purpose(?s:.*)nnx\.Rngs\(key\)"):
        export.export(nnx.jit(lambda rngs: rngs.normal((2,)), **mode))(rngs)
    draw = nnx.jit(lambda key: nnx.Rngs(key).normal((2,)), **mode)
    key = jax.random.key(3)
    np.testing.assert_array_equal(export.export(draw)(key).call(key), draw(key))


def test_function_that_changes_attributes_is_refused():
    def name(model):
        model.name = "x"

    with pytest.raises(ValueError, match="attributes of the arguments change"):
        export.export(nnx.jit(name))(counted())


def test_array_refs_are_refused(mode):
    model = nnx.to_refs(counted())
    says = r"takes array refs(?s:.*)args\[0\]\.w(?s:.*)nnx\.to_arrays\(model\)"
    with pytest.raises(TypeError, match=says):
        export.export(nnx.jit(predict, **mode))(model, BATCH)


def test_shared_layer_is_read_twice():
    model = nnx.List([layer := zoo.Scale(3.0), layer])
    exported = export.export(nnx.jit(lambda m, x: m[1](m[0](x))))(model, BATCH)
    assert exported.call(model, jnp.ones((1, 2))).tolist() == [[9.0, 9.0]]


def test_function_is_exported_for_platforms_that_are_not_here():
    jitted = nnx.jit(predict)
    exported = export.export(jitted, platforms=["cpu", "cuda", "tpu"])(counted(), BATCH)
    assert exported.platforms == ("cpu", "cuda", "tpu")
    assert exported.call(counted(), jnp.ones((1, 2)))["y"].shape == (1, 2)


def test_a_compiled_function_that_donates_is_refused_within_another_transform(mode):
    def read(model):
        return model.w.sum()

    compiled = nnx.jit(read, donate_argnums=0, **mode).lower(scale()).compile()

    def within(x):
        return x * compiled(scale())

    with pytest.raises(TypeError, match="The compiled read donates arrays"):
        jax.grad(within)(1.0)
    model = scale()
    compiled(model)
    assert model.w[...].shape == scale().w[...].shape
