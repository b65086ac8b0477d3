"""Converting the Variables of an object (section 12.3): storage, and read-only.

At the end what earlier releases called it (12.5, and 10 of the contract of Variables).
"""

import copy
import inspect
import pickle
import warnings

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st

import graftree as nnx
from tests import comparisons, strategies, tables, zoo

ImmutableVariableError = nnx.errors.ImmutableVariableError


def tied():
    a, b = nnx.Param(jnp.ones(2)), nnx.Param(jnp.ones(2))
    return zoo.Box(a=a, b=b, c=a, d=b)


def small():
    return zoo.Box(a=nnx.Param(jnp.array([1.0, 2.0]), tag="x"), array=jnp.ones(2), n=3)


def increment(variable):
    variable[...] += 1


def test_variables_are_converted_and_the_input_stays():
    model = zoo.Parts()
    converted = nnx.with_vars(model, ref=True)
    assert type(converted) is zoo.Parts and converted is not model
    assert converted.a.ref and converted.b.ref and converted.a.tag == "x"
    assert isinstance(converted.a.get_raw_value(), jax.Ref)
    assert type(converted.b) is nnx.BatchStat
    assert not model.a.ref and isinstance(model.a.get_raw_value(), jax.Array)
    assert converted.array is model.array and converted.k == 1


def test_the_way_back_reads_the_refs():
    model = nnx.with_vars(zoo.Parts(), ref=True)
    model.a[...] = jnp.array([5.0, 6.0])
    back = nnx.with_vars(model, ref=False)
    model.a[...] = jnp.zeros(2)
    assert not back.a.ref and back.a[...].tolist() == [5.0, 6.0]


def test_what_is_as_requested_keeps_its_identity():
    model = zoo.Parts()
    some = nnx.with_vars(model, ref=True, only=nnx.Param)
    assert some.a is not model.a and some.b is model.b
    assert nnx.with_vars(some, ref=False).b is model.b
    assert nnx.with_vars(model).a is model.a


@pytest.mark.parametrize(
    "only", [nnx.Param, "x", nnx.PathContains("a"), lambda path, x: path == ("a",)]
)
def test_only_filters_by_path_and_variable(only):
    converted = nnx.with_vars(zoo.Parts(), ref=True, only=only)
    assert converted.a.ref and not converted.b.ref


@tables.cases(
    "node, get",
    (nnx.Param(jnp.ones(2)), lambda v: v),
    ([nnx.Param(jnp.ones(2)), 1], lambda x: x[0]),
    ((1, {"a": nnx.Param(jnp.ones(2))}), lambda x: x[1]["a"]),
    (nnx.State({"a": {"b": nnx.Param(jnp.ones(2))}}), lambda s: s["a"]["b"]),
    (nnx.List([nnx.Param(jnp.ones(2))]), lambda x: x[0]),
    ids=["Variable", "list", "tuple", "State", "List"],
)
def test_any_object_is_converted(node, get):
    converted = nnx.with_vars(node, ref=True)
    assert type(converted) is type(node) and get(converted).ref
    assert not get(node).ref


@pytest.mark.parametrize("leaf", [3, jnp.ones(2), jax.new_ref(jnp.ones(2)), None])
def test_what_is_no_variable_stays(leaf):
    assert nnx.with_vars(leaf, ref=True) is leaf


def test_conversion_inside_jit_reads_the_refs():
    model = nnx.with_vars(zoo.Parts(), ref=True)

    @jax.jit
    def gradient(model):
        def loss(model):
            return (model.a[...] ** 2).sum() + model.b[...].sum() + model.array.sum()

        return jax.grad(loss)(nnx.with_vars(model, ref=False)).a[...]

    assert gradient(model).tolist() == [2.0, 4.0]


# ----------------------------------------------------------------------- duplicates


def test_duplicates_that_would_be_converted_are_an_error():
    with pytest.raises(ValueError, match="Found duplicate at path") as caught:
        nnx.with_vars(tied(), ref=True)
    groups = [group.split() for group in str(caught.value).split("---")[1:-1]]
    assert groups == [["a", "c"], ["b", "d"]]


def test_duplicates_are_given_with_slashes():
    model = nnx.Dict(x=nnx.Dict(w=nnx.Param(jnp.ones(2))))
    model.y = nnx.List([model.x.w])
    with pytest.raises(ValueError, match=r"(?s)x/w.*y/0"):
        nnx.with_vars(model, ref=True)


def test_allowed_duplicates_are_converted_once_and_stay_shared():
    converted = nnx.with_vars(tied(), ref=True, allow_duplicates=True)
    assert converted.a is converted.c and converted.b is converted.d
    assert converted.a.ref and converted.b.ref


def test_duplicates_that_are_not_converted_do_not_count():
    model = tied()
    assert nnx.with_vars(model, ref=False).c is model.c
    assert nnx.with_vars(model, ref=True, only=nnx.BatchStat).c is model.c
    refs = nnx.with_vars(model, ref=True, allow_duplicates=True)
    assert nnx.with_vars(refs, ref=True).a is refs.a


def test_shared_modules_stay_shared():
    model = nnx.Dict(d=zoo.Parts())
    model.f = model.d
    converted = nnx.with_vars(model, ref=True)
    assert converted.d is converted.f and converted.d.a.ref


# ------------------------------------------------------------------------ read-only


WRITES = {
    "item": lambda m: m.a.__setitem__(..., jnp.zeros(2)),
    "part": lambda m: m.a.__setitem__(0, 0.0),
    "set_value": lambda m: m.a.set_value(jnp.zeros(2)),
    "set_raw_value": lambda m: m.a.set_raw_value(jnp.zeros(2)),
    "update": lambda m: nnx.update(m, {"b": jnp.ones(2), "a": jnp.zeros(2)}),
    "update with Variables": lambda m: nnx.update(m, nnx.state(zoo.Parts())),
    "update_from_state": lambda m: m.a.update_from_state(nnx.Param(jnp.zeros(2))),
    "copy_from": lambda m: m.a.copy_from(nnx.Param(jnp.zeros(2))),
    "jax.jit closure": lambda m: jax.jit(lambda: m.a.set_value(0))(),
    "jax.jit argument": lambda m: jax.jit(lambda m: m.a.set_value(0))(m),
}


@pytest.mark.parametrize("ref", [False, True], ids=["arrays", "refs"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_read_only_variables_refuse_every_write(write, ref):
    model = nnx.with_vars(zoo.Parts(), ref=ref, mutable=False, only="x")
    with pytest.raises(ImmutableVariableError, match="Param.*read-only"):
        write(model)
    assert model.a[...].tolist() == [1.0, 2.0]
    assert model.b[...].tolist() == [3.0, 4.0]


def test_read_only_is_named_with_path_and_way_out():
    model = nnx.Dict(inner=nnx.with_vars(zoo.Parts(), mutable=False))
    told = "at inner/a", "nnx.with_vars(node, mutable=True)"
    with comparisons.raises(ImmutableVariableError, *told):
        nnx.update(model, {"inner": {"a": jnp.zeros(2)}})


@pytest.mark.parametrize("ref", [False, True], ids=["arrays", "refs"])
def test_mutable_undoes_read_only(ref):
    model = nnx.with_vars(zoo.Parts(), ref=ref)
    thawed = nnx.with_vars(nnx.with_vars(model, mutable=False), mutable=True)
    thawed.a[...] += 1
    assert thawed.a[...].tolist() == [2.0, 3.0]
    assert thawed.a.get_metadata() == model.a.get_metadata()
    assert jax.tree.structure(thawed) == jax.tree.structure(model)
    assert nnx.with_vars(model, mutable=True).a is model.a


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), nnx.clone],
    ids=["deepcopy", "pickle", "clone"],
)
def test_copies_of_read_only_variables_are_read_only(duplicate):
    copied = duplicate(nnx.with_vars(zoo.Parts(), mutable=False))
    with pytest.raises(ImmutableVariableError):
        copied.a[...] += 1


def test_read_only_variables_are_read_and_differentiated():
    frozen = nnx.with_vars(nnx.state(zoo.Parts(), nnx.Param), mutable=False)
    grads = jax.grad(lambda state: (state.a[...] ** 2).sum())(frozen)
    assert grads.a[...].tolist() == [2.0, 4.0]


def test_the_input_of_a_conversion_and_the_target_of_an_update_stay_writable():
    model = zoo.Parts()
    frozen = nnx.with_vars(model, mutable=False)
    increment(model.a)
    assert model.a[...].tolist() == [2.0, 3.0]
    nnx.update(model, nnx.state(frozen))
    increment(model.a)
    assert model.a[...].tolist() == [2.0, 3.0]


def test_an_optimizer_refuses_read_only_parameters_before_any_write():
    model = nnx.Dict(a=nnx.Param(jnp.ones(2)), b=nnx.Param(jnp.ones(2)))
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    model.b = model.b.copy(mutable=False)
    grads = nnx.clone(nnx.state(model, nnx.Param))
    with pytest.raises(ImmutableVariableError):
        optimizer.update(model, grads)
    assert model.a[...].tolist() == [1.0, 1.0] and optimizer.step[...] == 0


def test_a_transform_that_writes_read_only_variables_changes_nothing():
    model = nnx.with_vars(zoo.Parts(), mutable=False, only="x")

    @nnx.jit
    def f(model):
        model.b[...] += 1
        model.a[...] += 1

    with pytest.raises(ImmutableVariableError):
        f(model)
    assert model.b[...].tolist() == [3.0, 4.0]


# ----------------------------------------------------------------------- deprecated


def test_vars_as_is_the_older_name():
    with pytest.warns(DeprecationWarning, match="Use with_vars instead"):
        converted = nnx.vars_as(zoo.Parts(), ref=True)
    assert converted.a.ref
    assert inspect.signature(nnx.vars_as) == inspect.signature(nnx.with_vars)


@tables.cases(
    "option, holds",
    ({"is_hijax": True}, lambda v: v.hijax),
    ({"has_ref": True}, lambda v: v.ref),
    ({"is_mutable": False}, lambda v: v.get_metadata("mutable") is False),
)
def test_vars_as_takes_its_older_keywords(option, holds):
    with pytest.warns(DeprecationWarning):
        assert holds(nnx.vars_as(zoo.Parts(), **option).a)


# ---------------------------------------------------------------- flags of Variables


# Older flags, and the present ``(hijax, ref)``.
OLDER = [({"use_ref": True}, (False, True)), ({"has_ref": True}, (False, True))]
OLDER += [({"is_hijax": True}, (True, True)), ({"use_ref": False}, (False, False))]
OLDER += [({"is_hijax": True, "ref": False}, (True, False))]


@pytest.mark.parametrize(("older", "flags"), OLDER, ids=str)
def test_older_flags_are_understood(older, flags):
    made = nnx.Variable(jnp.ones(2), tag="x", **older)
    for variable in (made, nnx.Variable(jnp.ones(2), tag="x").copy(**older)):
        assert (variable.hijax, variable.ref) == flags and variable.tag == "x"
        assert variable.has_ref is flags[1] and variable.is_hijax is any(flags)
        names = {"tag", "hijax", "ref", "eager_sharding"}
        assert {*variable.get_metadata()} == names


@pytest.mark.parametrize("flag", ["use_ref", "is_hijax"])
def test_older_flags_win_over_defaults_and_writes_under_plain_jit_propagate(flag):
    with nnx.use_refs(True):
        assert not nnx.Variable(jnp.ones(2), use_ref=False).has_ref
    variable = nnx.Variable(jnp.array([1, 2, 3]), **{flag: True})
    jax.jit(increment)(variable)
    jax.jit(lambda: increment(variable))()
    assert variable[...].tolist() == [3, 4, 5]


# ---------------------------------------------------------------- to_refs, to_arrays


@pytest.mark.parametrize("convert", [nnx.to_refs, nnx.as_ref_vars])
def test_variables_without_a_value_have_nothing_to_put_in_a_ref(convert):
    node = nnx.Dict(cache=nnx.Variable(None), masked=nnx.Param({}), w=nnx.Param(1.0))
    refs = convert(node)
    assert refs.w.ref and refs.cache is node.cache and refs.masked is node.masked


def test_to_refs_converts_variables_and_arrays():
    plain = small()
    refs = nnx.to_refs(plain)
    assert refs.a.ref and refs.a.tag == "x" and refs.n == 3
    assert isinstance(refs.array, jax.Ref) and refs.array[...].tolist() == [1.0, 1.0]
    assert not plain.a.ref and isinstance(plain.array, jax.Array)
    bare = nnx.to_refs(jnp.ones(2))
    assert isinstance(bare, jax.Ref) and isinstance(nnx.to_arrays(bare), jax.Array)


def test_to_arrays_is_the_inverse():
    refs = nnx.to_refs(small())
    refs.a[...] += 1
    refs.array[...] = jnp.zeros(2)
    arrays = nnx.to_arrays(refs)
    refs.a[...] += 1
    assert not arrays.a.ref and arrays.a[...].tolist() == [2.0, 3.0]
    assert isinstance(arrays.array, jax.Array) and arrays.array.tolist() == [0.0, 0.0]
    assert jax.tree.structure(arrays) == jax.tree.structure(small())


def test_what_is_converted_already_keeps_its_identity():
    plain = small()
    refs = nnx.to_refs(plain)
    again, arrays = nnx.to_refs(refs), nnx.to_arrays(plain)
    assert again.a is refs.a and again.array is refs.array
    assert arrays.a is plain.a and arrays.array is plain.array


def test_only_filters_by_path_and_leaf():
    refs = nnx.to_refs([small(), small()], only=lambda path, x: path[0] == 0)
    assert refs[0].a.ref and isinstance(refs[0].array, jax.Ref)
    assert not refs[1].a.ref and isinstance(refs[1].array, jax.Array)
    assert not nnx.to_refs(small(), jax.Array).a.ref
    arrays = nnx.to_arrays(refs, only=nnx.Variable)
    assert not arrays[0].a.ref and isinstance(arrays[0].array, jax.Ref)


@pytest.mark.parametrize("make", [lambda: jnp.ones(2), lambda: nnx.Param(jnp.ones(2))])
def test_shared_leaves_are_an_error(make):
    in_ref = nnx.to_refs(make())
    for shared, convert in ((make(), nnx.to_refs), (in_ref, nnx.to_arrays)):
        tied = {"a": shared, "b": [shared]}
        with pytest.raises(ValueError, match=r"(?s)Found duplicate at path.*a.*b/0"):
            convert(tied)
    arrays = nnx.to_arrays(tied, allow_duplicates=True)
    assert arrays["a"] is arrays["b"][0]


# ------------------------------------------------------------------- the other names


# The flag that each sets, and its value.
WRAPPERS = {
    "as_ref_vars": ("ref", True),
    "as_array_vars": ("ref", False),
    "as_hijax_vars": ("hijax", True),
    "as_pytree_vars": ("hijax", False),
    "to_hijax": ("hijax", True),
    "to_lojax": ("hijax", False),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_of_with_vars(name):
    flag, value = WRAPPERS[name]
    given = nnx.with_vars(small(), **{flag: not value})
    converted = getattr(nnx, name)(given, only=nnx.Param)
    assert converted.a.get_metadata(flag) is value
    tied = nnx.Dict(a=given.a, b=given.a)
    with pytest.raises(ValueError, match="Found duplicate"):
        getattr(nnx, name)(tied)
    converted = getattr(nnx, name)(tied, allow_duplicates=True)
    assert converted.a is converted.b


def test_read_only_and_back():
    frozen = nnx.as_immutable_vars(small())
    with pytest.raises(nnx.errors.ImmutableVariableError):
        increment(frozen.a)
    thawed = nnx.as_mutable_vars(frozen)
    increment(thawed.a)
    assert thawed.a[...].tolist() == [2.0, 3.0]


def test_names_of_refs():
    ref = nnx.array_ref(jnp.ones(2))
    assert isinstance(ref, nnx.ArrayRef) and nnx.ArrayRef is jax.Ref
    assert nnx.is_array_ref(ref) and not nnx.is_array_ref(ref[...])
    assert nnx.variablelib.is_array_ref is nnx.is_array_ref
    assert nnx.variablelib.Ref is jax.Ref


def test_pure_is_as_pure():
    with pytest.warns(DeprecationWarning, match="Use as_pure instead"):
        pure = nnx.pure(nnx.state(nnx.to_refs(small())))
    assert pure["a"].tolist() == [1.0, 2.0] and pure["array"].tolist() == [1.0, 1.0]


# ------------------------------------------------------------------------------- writes

SHAPE = (2, 3)
DTYPES = [jnp.float32, jnp.int32, jnp.bool_, jnp.bfloat16, jnp.complex64]

INDICES = [
    ..., (), 0, -1, 5, -7, (0, 1), (0, -1), (..., 0), (0, ...), (..., ...), (0, 1, 2),
    slice(None), slice(1, None), slice(-1, None), slice(0, 9), slice(5, 9), slice(1, 0),
    slice(None, None, 2), slice(None, None, -1), (slice(None), 0), (slice(None), 7),
    (slice(None), slice(1, 3)), np.int32(1), jnp.array(1), jnp.array(7), jnp.array(-1),
    np.array([0, 1]), jnp.array([1, 1]), jnp.array([0, 5]), (np.array([0, 1]), 0), [0],
    (0, [0, 1]), (np.array([[0], [1]]), np.array([0, 2])), np.array([], int), True,
    None, (None, 0), np.array([True, False]), (slice(None), np.arange(3) < 2), "a",
    1.5, slice(0.5, None), slice(None, None, 0),
    (0, slice(None, None, 2)), (slice(0, 1, 2), 1),
]  # fmt: skip

VALUES = [
    1, 2.5, True, 1j, -0.0, np.float64(3), np.int8(4), [5.0, 6.0, 7.0], "text", None,
    np.arange(3), np.ones(SHAPE), jnp.arange(3.0), jnp.ones(SHAPE),
    jnp.ones((1, 3), int), jnp.ones((2, 1), jnp.bfloat16), jnp.ones(2, bool),
    jnp.ones((5, 2)), jnp.ones(0), jnp.array(2, jnp.complex64),
    nnx.Param(jnp.arange(3)), nnx.Param(1.5, ref=True),
    jax.ShapeDtypeStruct(SHAPE, jnp.float32),
]  # fmt: skip


def outcome(dtype, ref, write):
    """What a write leaves and warns of, or the type of its error."""
    variable = nnx.Param(jnp.arange(6).reshape(SHAPE).astype(dtype), ref=ref)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            write(variable)
        except Exception as error:
            return type(error)
    value = variable[...]
    return value.dtype, value.tolist(), {warning.category for warning in caught}


def assign(index, value):
    def write(variable):
        variable[index] = value

    return write


def in_scan(index, value):
    def write(variable):
        def body(variable, x):
            variable[index] = value

        nnx.scan(body, in_axes=(None, 0), graph_updates=False)(variable, jnp.zeros(2))

    return write


ASSIGN = st.sampled_from([assign, lambda *args: nnx.jit(assign(*args)), in_scan])


@strategies.examples(40, 150)
@hypothesis.given(ASSIGN, *map(st.sampled_from, (DTYPES, INDICES, VALUES)))
def test_writes_do_what_they_do_without_a_ref(write, dtype, index, value):
    """Issue 12, §12."""
    write = write(index, value)
    assert outcome(dtype, True, write) == outcome(dtype, False, write)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_reads_give_what_they_give_without_a_ref(index, transform):
    def read(ref):
        variable = nnx.Param(jnp.arange(6.0).reshape(SHAPE), ref=ref)
        try:
            return transform(lambda variable: variable[index])(variable).tolist()
        except Exception as error:
            return type(error)

    assert str(read(True)) == str(read(False))  # what is out of bounds reads as nan


@pytest.mark.parametrize("index", [0, -1, 1, 2, -3])
def test_a_traced_index_writes_where_an_array_is_written(index):
    variable = nnx.Param(jnp.zeros(2), ref=True)

    @jax.jit
    def write(variable, index, value):
        variable[index] = value
        variable[...] *= 2

    write(variable, index, 3)
    assert variable[...].tolist() == (jnp.zeros(2).at[index].set(3) * 2).tolist()


WHOLE = [
    lambda variable, value: variable.set_value(value),
    lambda variable, value: nnx.update([variable], {0: value}),
    lambda variable, value: variable.update_from_state(nnx.Param(value)),
    lambda variable, value: nnx.update(variable, nnx.Param(value)),
]


@pytest.mark.parametrize("write", WHOLE)
@pytest.mark.parametrize("value", [5, 5.0, jnp.array(5), jnp.full(3, 5), np.full(3, 5)])
def test_a_new_value_is_cast_and_a_scalar_fills(write, value):
    """Issue 12, §12: a ref keeps its shape and dtype, so it takes what fits these."""
    variable = nnx.Param(jnp.zeros(3), ref=True)
    ref = variable.get_raw_value()
    write(variable, value)
    assert variable.get_raw_value() is ref
    assert ref.dtype == jnp.float32 and ref[...].tolist() == [5.0, 5.0, 5.0]


@pytest.mark.parametrize("write", WHOLE)
@pytest.mark.parametrize("value", [jnp.ones(1), jnp.ones((1, 3)), jnp.ones(4)])
def test_a_new_value_of_another_shape_is_an_error(write, value):
    variable = nnx.Param(jnp.zeros(3), ref=True)
    with pytest.raises(ValueError, match="Invalid shape"):
        write(variable, value)
    assert variable[...].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("write", WHOLE)
def test_a_cast_that_loses_something_is_told(write):
    variable = nnx.Param(jnp.zeros(3, jnp.int32), ref=True)
    with pytest.raises(FutureWarning, match="cannot safely cast"):
        write(variable, jnp.full(3, 1.5))
    assert variable[...].tolist() == [0, 0, 0]


def test_an_optimizer_updates_refs_of_lower_precision():
    variable = nnx.Param(jnp.ones(2, jnp.bfloat16), ref=True)
    optimizer = nnx.Optimizer(variable, optax.sgd(1.0), wrt=nnx.Param)
    optimizer.update(variable, nnx.Param(jnp.ones(2, jnp.float32)))
    assert variable[...].dtype == jnp.bfloat16
    assert variable[...].tolist() == [0.0, 0.0]
