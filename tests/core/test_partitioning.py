"""Specs are checked against annotations written out, axes against the peer too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import graftree as nnx
from tests import tables

LAYERS = {nnx.PARTITION_NAME: "layers"}


@pytest.fixture
def mesh():
    auto = jax.sharding.AxisType.Auto
    return jax.make_mesh((2, 4), ("a", "b"), axis_types=(auto, auto))


def annotated(*annotation, shape=(8, 16), **metadata):
    metadata.setdefault("out_sharding", annotation)
    return nnx.Param(np.ones(shape, np.float32), eager_sharding=False, **metadata)


# ------------------------------------------------------------------ with_partitioning


def test_with_partitioning_boxes_the_value_with_its_annotation():
    init = nnx.with_partitioning(nnx.initializers.zeros, ("a", None), tag="x")
    boxed = init(jax.random.key(0), shape=(2, 3), dtype=jnp.int32)
    assert isinstance(boxed, nnx.VariableMetadata)
    assert (boxed.raw_value.shape, boxed.raw_value.dtype) == ((2, 3), jnp.int32)
    assert boxed.metadata == {"out_sharding": ("a", None), "mesh": None, "tag": "x"}


def test_variables_take_the_box_apart(mesh):
    init = nnx.with_partitioning(nnx.initializers.ones, ("a", "b"), mesh)
    param = nnx.Param(init(jax.random.key(0), (2, 4)))
    assert param.out_sharding == ("a", "b") and param.mesh is mesh
    init = nnx.with_partitioning(nnx.initializers.ones, ("a", "b"))
    with jax.set_mesh(mesh):
        linear = nnx.Linear(2, 4, kernel_init=init, rngs=nnx.Rngs(0))
    assert param.sharding.spec == linear.kernel.sharding.spec == P("a", "b")


# ------------------------------------------------------------------------------ specs


@tables.cases(
    "annotation, spec",
    (("a", None), P("a", None)),
    (["a", "other"], P("a", "other")),
    (P("a"), P("a")),
    ((("a", "b"),), P(("a", "b"))),
    (None, P()),
    ((), P()),
    (P(), P()),
    (("in", "out"), P("a", None)),
    (["in", "other"], P("a", "other")),
    ((("in", "z"), None), P(("a", "z"), None)),
    (P("in"), P("a")),
    ids=str,
)
def test_the_spec_of_a_variable_is_its_annotation_with_names_mapped(annotation, spec):
    variable = annotated(out_sharding=annotation)
    with nnx.logical_axis_rules((("in", "a"), ("out", None))):
        assert nnx.spmd.get_var_pspec(variable) == spec
    if "in" not in str(annotation):
        assert nnx.spmd.get_var_pspec(variable) == spec


def test_what_is_no_tuple_of_names(mesh):
    variable = annotated(out_sharding=NamedSharding(mesh, P("a")))
    assert nnx.spmd.get_var_pspec(variable) == P("a")
    with pytest.raises(TypeError, match="'x'"):
        nnx.spmd.get_var_pspec(annotated(out_sharding="x"))
    for value in (3, {"x": 1}, None):
        assert nnx.spmd.get_var_pspec(nnx.Variable(value)) is None
    with jax.set_mesh(mesh), pytest.raises(TypeError, match="pairs of a name"):
        nnx.Param(np.ones(8), out_sharding=("embed",), sharding_rules=["embed"])


def test_specs_follow_rules_of_context_and_variable():
    variable = annotated("in", "out", sharding_rules=(("in", "a"),))
    with nnx.logical_axis_rules((("out", "b"),)):
        assert nnx.spmd.get_var_pspec(variable) == P("a", "b")
    assert nnx.spmd.get_var_pspec(variable) == P("a", "out")
    with nnx.logical_axis_rules((("in", "b"),)):
        with pytest.raises(ValueError, match="Inconsistent logical axis annotations"):
            nnx.get_partition_spec(variable)


def test_specs_keep_structure_type_and_metadata():
    tree = {"v": annotated("a", tag="x"), "array": jnp.ones(2), "n": 3, "none": None}
    specs = nnx.get_partition_spec(tree)
    assert type(specs["v"]) is nnx.Param
    assert specs["v"].get_metadata() == tree["v"].get_metadata()
    assert specs["v"].get_value() == P("a")
    assert (specs["array"], specs["n"], specs["none"]) == (P(), None, None)


def test_specs_of_modules_states_and_shapes_agree():
    model = nnx.Dict(kernel=annotated("a", "b"), bias=nnx.Param(np.ones(4)))
    specs = nnx.get_partition_spec(model)
    assert (specs.kernel.get_value(), specs.bias.get_value()) == (P("a", "b"), P())
    assert nnx.get_partition_spec(nnx.state(model))["kernel"].get_value() == P("a", "b")
    assert model.kernel.shape == (8, 16)
    abstract = jax.eval_shape(lambda: annotated("a"))
    assert nnx.get_partition_spec(abstract).get_value() == P("a")
    assert nnx.get_partition_spec(jax.ShapeDtypeStruct((2,), jnp.float32)) == P()


def test_named_shardings_place_states(mesh):
    state = nnx.state({"kernel": annotated("a", "b"), "bias": jnp.ones(3)})
    shardings = nnx.get_named_sharding(state, mesh)
    assert shardings["bias"] == NamedSharding(mesh, P())
    compiled = jax.jit(lambda x: x, out_shardings=shardings)
    for placed in (jax.device_put(state, shardings), compiled(state)):
        assert placed["kernel"].sharding == NamedSharding(mesh, P("a", "b"))


def test_specs_constrain_states_under_a_mesh(mesh):
    state = nnx.state({"kernel": annotated("a", "b")})
    with jax.set_mesh(mesh):
        specs = nnx.get_partition_spec(state)
        constrain = jax.jit(lambda x: jax.lax.with_sharding_constraint(x, specs))
        assert constrain(state)["kernel"].sharding.spec == P("a", "b")


def test_value_of_one_device_gets_on_the_mesh_inside_a_gradient():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    value = jax.device_put(np.ones(8, np.float32), jax.devices()[2])

    def loss(scale):
        return (nnx.Param(value, out_sharding=("x",))[...] * scale).sum()

    with jax.set_mesh(mesh):
        assert jax.grad(loss)(1.0) == 8.0


# ------------------------------------------------------------------------------- axes


@tables.cases(
    "annotation, shape, index, expected",
    ("ab", (8, 16), 0, ("layers", "a", "b")),
    ("ab", (8, 16), 1, ("a", "layers", "b")),
    ("ab", (8, 16), 2, ("a", "b", "layers")),
    ("ab", (8, 16), 4, ("a", "b", None, None, "layers")),
    ("ab", (8, 16), -1, ("a", "b", "layers")),
    ("ab", (8, 16), -2, ("a", "layers", "b")),
    ("ab", (8, 16), -3, ("layers", "a", "b")),
    # The last axis is last, whether the value has it already, and is there if not.
    ("a", (8,), -1, ("a", "layers")),
    ("a", (8, 16), -1, ("a", "layers")),
    ("a", (2, 3, 4), -1, ("a", None, "layers")),
)
@pytest.mark.parametrize("name", ["layers", None])
def test_added_axes_stand_at_their_index(annotation, shape, index, expected, name):
    variable = annotated(*annotation, shape=shape)
    assert nnx.spmd.add_axis(variable, index, {nnx.PARTITION_NAME: name}) is variable
    expected = tuple(name if x == "layers" else x for x in expected)
    assert variable.out_sharding == expected


@pytest.mark.parametrize("index", range(-3, 3))
def test_removing_undoes_adding(index):
    variable = annotated("a", "b")
    nnx.spmd.add_axis(variable, index, LAYERS)
    nnx.spmd.remove_axis(variable, index, LAYERS)
    assert variable.out_sharding == ("a", "b")


def test_partition_specs_become_tuples_and_named_shardings_keep_their_mesh(mesh):
    spec = annotated(out_sharding=P("a"))
    placed = annotated(out_sharding=NamedSharding(mesh, P("a")))
    nnx.spmd.add_axis([spec, placed], 0, {nnx.PARTITION_NAME: "b"})
    assert spec.out_sharding == ("b", "a") and type(spec.out_sharding) is tuple
    assert placed.out_sharding == NamedSharding(mesh, P("b", "a"))


def test_other_tuples_in_the_metadata_follow():
    variable = annotated("a", nickname=("x",), note="a text", empty=())
    names = {**LAYERS, "nickname": "l", "note": "n", "empty": "e", "absent": "q"}
    nnx.spmd.add_axis(variable, 0, names)
    assert variable.nickname == ("l", "x")
    assert (variable.note, variable.empty) == ("a text", ())
    assert not variable.has_metadata("absent")
    nnx.spmd.remove_axis(variable, 0, names)
    assert variable.nickname == ("x",)


@pytest.mark.parametrize("annotation", [None, ()])
@pytest.mark.parametrize("change", [nnx.spmd.add_axis, nnx.spmd.remove_axis])
def test_without_annotation_nothing_changes(change, annotation):
    variable = annotated(out_sharding=annotation)
    change(variable, 0, LAYERS)
    assert variable.out_sharding == annotation


def test_variables_are_told_once_each():
    told = []

    class Listening(nnx.Param):
        def add_axis(self, axis_index, axis_name):
            told.append(("add", axis_index, axis_name))

        def remove_axis(self, axis_index, axis_name):
            told.append(("remove", axis_index, axis_name))

    shared = Listening(jnp.ones(2))
    model = nnx.Dict(x=shared, y=shared)
    nnx.spmd.add_axis(model, 0, LAYERS)
    nnx.spmd.remove_axis(nnx.state(model), -1, LAYERS)
    assert told == [("add", 0, "layers"), ("remove", -1, "layers")]


@pytest.mark.parametrize("change", [nnx.spmd.add_axis, nnx.spmd.remove_axis])
def test_the_name_of_the_axis_is_required(change):
    with pytest.raises(ValueError, match='"partition_name" is not specified'):
        change(annotated("a"), 0, {"nickname": "x"})


@tables.cases("index, found", (0, "'a'"), (1, "'b'"), (5, "None"), (-1, "'b'"))
def test_removing_another_name_is_an_error_that_shows_both(index, found):
    message = rf"Expected to remove 'layers' at index {index} from \('a', 'b'\)"
    with pytest.raises(ValueError, match=f"{message}, but found {found}"):
        nnx.spmd.remove_axis(annotated("a", "b"), index, LAYERS)


def test_what_fails_changes_nothing():
    model = nnx.Dict(x=annotated("layers", "a"), y=annotated("b"))
    with pytest.raises(ValueError, match="Expected to remove"):
        nnx.spmd.remove_axis(model, 0, LAYERS)
    with pytest.raises(ValueError, match="Index -5 is out of range for 3 dimensions"):
        nnx.spmd.add_axis(model, -5, LAYERS)
    assert model["x"].out_sharding == ("layers", "a")


def test_variables_of_another_trace_are_not_changed():
    model = nnx.Dict(x=annotated("a"))

    @jax.jit
    def f():
        mine = annotated("a")
        with pytest.raises(nnx.errors.TraceContextError, match="Cannot mutate Param"):
            nnx.spmd.add_axis([mine, model], 0, LAYERS)
        return mine.out_sharding == ("a",)

    assert f() and model["x"].out_sharding == ("a",)


@pytest.mark.peers
@pytest.mark.parametrize("annotation", [("a",), ("a", "b"), P("a", None), ()])
@pytest.mark.parametrize("index", [0, 1, 2, 3])
def test_annotations_are_those_of_the_peer(annotation, index):
    peer = pytest.importorskip("flax.nnx")
    options = {"out_sharding": annotation, "eager_sharding": False}
    ours, theirs = (lib.Param(jnp.ones((8, 16)), **options) for lib in (nnx, peer))
    nnx.spmd.add_axis(ours, index, LAYERS)
    peer.spmd.add_axis(theirs, index, LAYERS)
    assert ours.out_sharding == theirs.out_sharding
    specs = [lib.spmd.get_var_pspec(x) for lib, x in ((nnx, ours), (peer, theirs))]
    assert specs[0] == specs[1]
