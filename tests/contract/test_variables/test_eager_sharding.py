"""Variables are placed at their creation, on eight simulated devices.

Contract of Variables, section 9, and of layers, 13 (`nnx.logical_axis_rules`).
"""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import graftree as nnx
from tests import tables

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
VALUE = np.arange(16.0, dtype=np.float32).reshape(4, 4)


def mesh_of(kind):
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(KINDS[kind],) * 2)


@pytest.fixture(params=KINDS)
def mesh(request):
    return mesh_of(request.param)


def spec_of(value):
    # An axis that is not split may show as None or be left out.
    return P(*value.sharding.spec, *(None,) * (value.ndim - len(value.sharding.spec)))


def placed_as(variable, *spec):
    value = variable.get_value()
    assert spec_of(value) == P(*spec)
    assert np.asarray(value).tolist() == VALUE.tolist()
    return True


# ----------------------------------------------------------------- the switch itself


def test_default_comes_from_the_flag_and_is_on():
    assert nnx.using_eager_sharding() is nnx.use_eager_sharding.current_value() is True
    nnx.config.update("flax_always_shard_variable", False)
    try:
        assert nnx.using_eager_sharding() is False
        assert nnx.Param(1).get_metadata("eager_sharding") is False
    finally:
        nnx.config.update("flax_always_shard_variable", True)


# ----------------------------------------------------------------- where the mesh is


XY = {"out_sharding": ("x", "y")}
MADE = {
    "eagerly": lambda x: nnx.Param(x, **XY),
    "in a ref": lambda x: nnx.Param(x, ref=True, **XY),
    "under jit": lambda x: jax.jit(lambda x: nnx.Param(x, **XY))(x),
    "under nnx.jit": lambda x: nnx.jit(lambda x: nnx.Param(x, **XY))(x),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_mesh_is_taken_from_the_context(make, mesh):
    with jax.set_mesh(mesh):
        assert placed_as(make(jnp.array(VALUE)), "x", "y")


def test_mesh_is_taken_from_the_metadata():
    mesh = mesh_of("auto")
    variable = nnx.Param(jnp.array(VALUE), out_sharding=("x", None), mesh=mesh)
    assert placed_as(variable, "x", None)


@pytest.mark.parametrize(
    ("names", "phrase"),
    [(("x", "y"), r"(?s)mesh context or metadata.*'x'"), ((None, None), "mesh")],
)
def test_missing_mesh_is_named_with_the_annotation(names, phrase):
    with pytest.raises(ValueError, match=phrase):
        nnx.Param(jnp.array(VALUE), out_sharding=names)


@pytest.mark.parametrize("annotation", [None, (), P()])
def test_empty_annotations_are_none(annotation):
    value = jnp.array(VALUE)
    assert nnx.Param(value, out_sharding=annotation)[...] is value


@pytest.mark.parametrize("off", ["argument", "context"])
def test_switched_off_nothing_is_placed(off):
    value, switch = jnp.array(VALUE), {"eager_sharding": False}
    with nnx.use_eager_sharding(off == "argument"):
        variable = nnx.Param(value, **XY, **(switch if off == "argument" else {}))
    assert variable[...] is value and variable.out_sharding == ("x", "y")


# ------------------------------------------------------------------ forms, and values


@tables.cases(
    "annotation, spec",
    (("x", "y"), ("x", "y")),
    (["x", "y"], ("x", "y")),
    (("x",), ("x", None)),
    ((None, "y"), (None, "y")),
    ((("x", "y"), None), (("x", "y"), None)),
    (P("y", "x"), ("y", "x")),
    ids=str,
)
def test_forms_of_annotations(annotation, spec, mesh):
    value = jnp.array(np.tile(VALUE, (2, 2)))
    with jax.set_mesh(mesh):
        variable = nnx.Param(value, out_sharding=annotation)
    assert spec_of(variable.get_value()) == P(*spec)
    assert variable.out_sharding == annotation


def test_named_sharding_brings_its_mesh():
    sharding = NamedSharding(mesh_of("auto"), P("x", "y"))
    assert placed_as(nnx.Param(jnp.array(VALUE), out_sharding=sharding), "x", "y")
    with jax.set_mesh(mesh_of("auto")):
        assert placed_as(nnx.Param(jnp.array(VALUE), out_sharding=sharding), "x", "y")


def test_two_different_meshes_are_refused():
    other = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh_of("auto"), P("x", "y"))
    with jax.set_mesh(other), pytest.raises(ValueError, match="mesh"):
        nnx.Param(jnp.array(VALUE), out_sharding=sharding)
    with pytest.raises(ValueError, match="mesh"):
        nnx.Param(jnp.array(VALUE), out_sharding=sharding, mesh=other)


def test_format_is_an_annotation():
    sharding = NamedSharding(mesh_of("auto"), P("x", "y"))
    annotation = Format(Layout(major_to_minor=(0, 1)), sharding)
    for value in (jnp.array(VALUE), jax.device_put(VALUE, jax.devices()[3])):
        assert placed_as(nnx.Param(value, out_sharding=annotation), "x", "y")
    shape = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    assert nnx.Param(shape, out_sharding=annotation).get_value().sharding == sharding


def test_every_leaf_of_a_pytree_gets_the_annotation(mesh):
    with jax.set_mesh(mesh):
        stored = {"a": jnp.array(VALUE), "b": [jnp.array(VALUE)]}
        variable = nnx.Variable(stored, out_sharding=("x", None))
    value = variable.get_value()
    assert spec_of(value["a"]) == spec_of(value["b"][0]) == P("x", None)


def test_values_made_outside_the_mesh_context_are_placed(mesh):
    values = [jnp.array(VALUE), VALUE, jax.device_put(VALUE, jax.devices()[3])]
    with jax.set_mesh(mesh):
        for value in values:
            assert placed_as(nnx.Param(value, out_sharding=("x", "y")), "x", "y")


def test_value_placed_otherwise_is_moved(mesh):
    with jax.set_mesh(mesh):
        first = nnx.Param(jnp.array(VALUE), out_sharding=("x", "y"))
        assert placed_as(nnx.Param(first[...], out_sharding=("y", None)), "y", None)


def test_shapes_carry_the_sharding(mesh):
    with jax.set_mesh(mesh):
        shape = jax.ShapeDtypeStruct((4, 4), jnp.float32)
        value = nnx.Param(shape, out_sharding=("x", "y")).get_value()
    assert value.sharding.spec == P("x", "y") and value.shape == (4, 4)


# --------------------------------------------------------------------- logical names


# Of the context, of the metadata, and the axes that ``("rows", "columns")`` mean then.
NAMED = {
    "metadata": ((), [("rows", "y"), ("columns", "x")], ("y", "x")),
    "context": ((("rows", "x"), ("columns", None)), None, ("x", None)),
    "both": ((("rows", "x"),), (("columns", ("y",)), ("rows", "x")), ("x", "y")),
}


@pytest.mark.parametrize(("context", "rules", "axes"), NAMED.values(), ids=NAMED)
def test_rules_map_logical_names(mesh, context, rules, axes):
    entries = {"sharding_rules": rules} if rules else {}
    with jax.set_mesh(mesh), nnx.logical_axis_rules(context):
        value = jnp.array(VALUE)
        variable = nnx.Param(value, out_sharding=("rows", "columns"), **entries)
    assert placed_as(variable, *axes)
    assert variable.out_sharding == ("rows", "columns")


RULES = (("in", "x"), ("out", "y"))


@pytest.fixture
def auto_mesh():
    with jax.set_mesh(mesh_of("auto")):
        yield


def layer(names=("in", "out"), **metadata):
    """One whose kernel has an axis of each name."""
    options = {"kernel_metadata": {"out_sharding": names, **metadata}}
    init = {"kernel_init": nnx.initializers.ones}
    return nnx.Linear(8, 8, **options, **init, rngs=nnx.Rngs(0))


def kernel(*args, **metadata):
    return layer(*args, **metadata).kernel


def test_inner_rules_replace_the_outer_ones_and_end(auto_mesh):
    with nnx.logical_axis_rules(RULES):
        with nnx.logical_axis_rules((("in", "y"), ("out", None))):
            assert spec_of(kernel()) == P("y", None)
        assert spec_of(kernel()) == P("x", "y")


def test_rules_end_with_an_error(auto_mesh):
    with pytest.raises(KeyError), nnx.logical_axis_rules((("x", "y"),)):
        raise KeyError
    assert spec_of(kernel(("x", None))) == P("x", None)


def test_rules_are_those_of_the_thread():
    def other_rules():
        with nnx.logical_axis_rules((("in", None), ("out", "x"))):
            return other.submit(rules_in_force).result()

    def rules_in_force():
        with jax.set_mesh(jax.make_mesh((2,), ("in",))):
            return spec_of(kernel(("in", None)))

    with concurrent.futures.ThreadPoolExecutor(1) as other:
        assert other_rules() == P("in", None)


def test_contradicting_rules_are_named(auto_mesh):
    message = "(?s)Inconsistent logical axis annotations for.*in.*"
    with nnx.logical_axis_rules((("in", "x"),)):
        with pytest.raises(ValueError, match=message) as caught:
            kernel(sharding_rules=(("in", "y"),))
    assert "'x'" in str(caught.value) and "'y'" in str(caught.value)


def test_state_of_an_optimizer_is_placed_like_its_params(auto_mesh):
    with nnx.logical_axis_rules(RULES):
        model = layer()
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
        grads = nnx.grad(lambda m: m.kernel.sum() + m.bias.sum())(model)
        optimizer.update(model, grads)
    moments = optimizer.opt_state[0]
    for variable in (moments.mu["kernel"], moments.nu["kernel"], model.kernel):
        assert spec_of(variable) == P("x", "y")


# -------------------------------------------------------------------------- refusals


def test_mixed_meshes_are_refused():
    kinds = (AxisType.Auto, AxisType.Explicit)
    with jax.set_mesh(jax.make_mesh((2, 4), ("x", "y"), axis_types=kinds)):
        with pytest.raises(ValueError, match="Auto"):
            nnx.Param(jnp.array(VALUE), out_sharding=("x", "y"))


def test_unknown_axes_and_indivisible_sizes_are_refused_by_jax(mesh):
    for value, name in ((jnp.array(VALUE), "unknown"), (jnp.ones((3, 4)), "x")):
        with jax.set_mesh(mesh), pytest.raises(ValueError):
            nnx.Param(value, out_sharding=(name, None))


def test_more_entries_than_dimensions_are_refused(mesh):
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="(?s)'x'.*0 dimensions"):
        nnx.Param(1.0, out_sharding=("x",))


# ----------------------------------------------------------------- inside transforms


@pytest.mark.parametrize("kind", KINDS)
def test_eval_shape_knows_the_sharding(kind):
    with jax.set_mesh(mesh_of(kind)):
        made = jax.eval_shape(lambda: nnx.Param(jnp.array(VALUE), **XY))
    assert made.get_value().shape == (4, 4) and made.out_sharding == ("x", "y")
    if kind == "explicit":
        assert made.get_value().sharding.spec == P("x", "y")


# -------------------------------------------------------------------- only at creation


def test_nothing_else_places(mesh):
    with jax.set_mesh(mesh):
        variable = nnx.Param(jnp.array(VALUE), out_sharding=("x", "y"))
        other = jax.device_put(jnp.array(VALUE), NamedSharding(mesh, P("y", None)))
        assert variable.copy(other)[...] is other
        assert variable.replace(out_sharding=("y", "x"))[...] is variable[...]
        variable.set_value(other)
        assert variable[...] is other
        graphdef, state = nnx.split(nnx.Dict(a=variable))
        assert nnx.merge(graphdef, state).a[...] is other


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("compile", [lambda f: f, nnx.jit])
def test_a_whole_write_keeps_the_sharding(compile, kind):
    """Also if the new value lies elsewhere on the mesh."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind,) * 2)

    @compile
    def write(variable, value):
        variable[...] = value

    with jax.set_mesh(mesh):
        variable = nnx.Param(jnp.ones((8, 8)), out_sharding=("a", "b"))
        for spec in (P("b"), P(None, "a"), P(), P(("a", "b"))):
            value = jax.device_put(jnp.full((8, 8), 2.0), NamedSharding(mesh, spec))
            write(variable, value)
            if compile is nnx.jit and kind == AxisType.Auto:
                continue  # as the compiler likes
            assert variable.sharding.shard_shape((8, 8)) == (4, 2)
            assert float(variable.sum()) == 128
