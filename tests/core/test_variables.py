"""Corners of Variables; static values; names of axes and where they place.

The contract has the rules: tests/contract/test_variables and test_refs.
"""

import collections
import copy
import dataclasses
import enum
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P

import graftree as nnx
from tests import meshes, strategies, tables, zoo

ImmutableVariableError = nnx.errors.ImmutableVariableError


# ----------------------------------------------------------------------------- values


def test_older_names_warn_at_the_line_that_has_them():
    variable = nnx.Param(1.0)
    with pytest.warns(DeprecationWarning) as record:
        variable.value = variable.value + 1
        variable.raw_value = variable.raw_value + 1
        assert variable.sharding_names is None and variable.get_value() == 3.0
    assert [warning.filename for warning in record] == [__file__] * 5


def test_a_variable_takes_what_the_ref_of_another_holds():
    first, second = nnx.Param(1.0, ref=True), nnx.Param(2.0, ref=True)
    ref = first.get_raw_value()
    nnx.update(first, second)
    nnx.update(second, second)
    assert first.get_raw_value() is ref and first[...] == second[...] == 2.0
    with pytest.raises(AttributeError):  # of one that is half made
        object.__new__(nnx.Param)._raw_value


STORED = jnp.ones(2), jnp.array([1, 2]), jnp.array(True), jnp.bfloat16(1)
GIVEN = [
    *(1, 1.5, True, None, "text", np.float64(2), np.ones(2), jnp.ones(2), jnp.ones(3)),
    *(jnp.ones((1, 2)), jnp.float32(1), jnp.int8(1), jnp.array(1.0), jnp.bfloat16(1)),
    jax.ShapeDtypeStruct((2,), jnp.float32),
]


def is_written(write):
    """Whether JAX writes the value, and doesn't warn."""
    try:
        write()
    except (TypeError, ValueError, FutureWarning):
        return False
    return True


@pytest.mark.parametrize("value", GIVEN, ids=str)
@pytest.mark.parametrize("stored", STORED, ids=lambda x: f"{x.dtype}{list(x.shape)}")
def test_what_fits_a_ref_is_what_fits_an_array(stored, value):
    variable = nnx.Param(stored, ref=True)
    fits = is_written(lambda: stored.at[...].set(value))
    assert is_written(lambda: nnx.update([variable], {0: value})) is fits
    assert fits or (variable[...] == stored).all()


# -------------------------------------------------------------------- all or nothing


@tables.cases(
    "second",
    nnx.Param(jnp.ones(3), ref=True),
    nnx.Param(jnp.ones(2), mutable=False),
    ids=["other shape", "read-only"],
)
def test_nothing_is_written_if_one_value_can_not_be(second):
    first = nnx.Param(jnp.zeros(2))
    with pytest.raises((ValueError, ImmutableVariableError)):
        nnx.update([first, second], {0: jnp.ones(2), 1: jnp.zeros(2)})
    assert not first[...].any() and second[...].all()


def test_nothing_is_written_if_one_variable_is_of_another_trace():
    outer = nnx.Param(1)

    @jax.jit
    def f(x):
        inner = nnx.Param(2)
        with pytest.raises(nnx.errors.TraceContextError):
            nnx.update([inner, outer], {0: x, 1: x})
        return inner.get_raw_value()

    assert f(5.0) == 2 and outer.get_raw_value() == 1


# --------------------------------------------------------------------------- metadata


def test_what_can_not_be_changed_is_told_with_the_way_out():
    with pytest.raises(ValueError, match=r"copy\(ref=True\)"):
        nnx.Param(1.0).set_metadata(ref=True)


def test_hashable_mappings_are_read_like_dicts_and_do_not_follow_their_origin():
    given = {"x": 1, "y": 2}
    mapping = nnx.graphlib.HashableMapping(given)
    other = nnx.graphlib.HashableMapping({"y": 2, "x": 1})
    given["x"] = 2
    assert dict(mapping) == {"x": 1, "y": 2} and mapping["x"] == 1
    assert [mapping.get("y"), mapping.get("z"), mapping.get("z", 3)] == [2, None, 3]
    assert mapping == other and hash(mapping) == hash(other)
    assert mapping != nnx.graphlib.HashableMapping({"x": 1}) and mapping != dict(other)
    with pytest.raises(TypeError):
        hash(nnx.graphlib.HashableMapping({"a": []}))


# -------------------------------------------------------------------------- operators


def test_arrays_convert_with_dtype_and_copy_and_leave_operators_to_the_variable():
    buffer = np.ones(2)
    variable = nnx.Param(buffer)
    assert np.asarray(variable, dtype=np.int32).dtype == np.int32
    assert np.array(variable, copy=True) is not buffer
    out = buffer + variable
    assert isinstance(out, np.ndarray) and out.tolist() == [2.0, 2.0]


# ------------------------------------------------------------------ defaults and names


def test_defaults_are_set_and_undone_together_and_equal_by_content():
    assert nnx.var_defaults() == nnx.var_defaults()
    with pytest.raises(KeyError), nnx.var_defaults(ref=True, hijax=True):
        assert nnx.var_defaults() == nnx.variablelib.VarDefaults(hijax=True, ref=True)
        assert dict(nnx.var_defaults()) == {"hijax": True, "ref": True}
        raise KeyError
    assert dict(nnx.var_defaults()) == {"hijax": False, "ref": False}
    with nnx.config.temp_flip_flag("flax_array_ref", True):
        assert nnx.var_defaults().ref is True


# ------------------------------------------------------------------------ static values

Pair = collections.namedtuple("Pair", "one two")


@dataclasses.dataclass(frozen=True)
class Frozen:
    size: object
    cache: object = dataclasses.field(default=None, compare=False)


class Size(enum.IntEnum):
    ONE = 1


def skeleton(value):
    return nnx.graphdef(zoo.Box(k=nnx.static(value)))


EQUAL = [
    [1, True, 1.0, 1 + 0j, np.int8(1), np.int32(1), np.float32(1), np.True_, Size.ONE],
    [0.0, -0.0, 0, False],
    [complex(0.0, 0.0), complex(0.0, -0.0), complex(-0.0, 0.0)],
    [(1, 2), (1.0, 2), Pair(1, 2), (True, 2)],
    [frozenset([1]), frozenset([1.0]), {1}],
    [frozenset([(1, 2.0)]), frozenset([(1.0, 2)])],
    [Frozen(1), Frozen(1.0), Frozen(True)],
    [((0.0,),), ((-0.0,),)],
    [float("nan")],
    [(float("nan"),)],
]


@pytest.mark.parametrize("values", EQUAL, ids=str)
def test_equal_values_of_other_types_or_signs_are_told_apart(values):
    for a, b in itertools.combinations(values, 2):
        assert a == b and skeleton(a) != skeleton(b)
    for value in values:
        assert skeleton(value) == skeleton(copy.deepcopy(value))


# Two dataclasses that hold NaN are not equal since Python 3.13.
numbers = st.integers() | st.floats(allow_nan=False)
atoms = st.none() | st.booleans() | numbers | st.text()
nested = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner).map(tuple)
        | st.lists(inner)
        | st.dictionaries(st.text(), inner)
        | st.builds(Frozen, inner)
    ),
)


@strategies.examples(40, 200)
@given(nested)
def test_copies_of_nested_values_have_equal_skeletons(value):
    assert skeleton(value) == skeleton(copy.deepcopy(value))
    assert skeleton(Frozen(1, [value])) == skeleton(Frozen(1, value))


# ------------------------------------------------------------------------- partitioning

LAYERS = {nnx.PARTITION_NAME: "layers"}


@pytest.fixture
def mesh():
    return meshes.mesh_of(a=2, b=4)


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
    ((("a", "b"),), P(("a", "b"))),
    (None, P()),
    (("in", "out"), P("a", None)),
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


def test_value_of_one_device_gets_on_the_mesh_inside_a_gradient():
    value = jax.device_put(np.ones(8, np.float32), jax.devices()[2])

    def loss(scale):
        return (nnx.Param(value, out_sharding=("x",))[...] * scale).sum()

    with jax.set_mesh(meshes.mesh_of(x=8)):
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
