"""Converting the Variables of an object (section 12.3): storage, and read-only."""

import copy
import inspect
import pickle

import jax
import jax.numpy as jnp
import optax
import pytest

import graftree as nnx
from tests.zoo import Box, Parts

ImmutableVariableError = nnx.errors.ImmutableVariableError


def tied():
    a, b = nnx.Param(jnp.ones(2)), nnx.Param(jnp.ones(2))
    return Box(a=a, b=b, c=a, d=b)


def test_signature_is_that_of_flax():
    parameters = inspect.signature(nnx.with_vars).parameters
    assert [*parameters] == [
        "node", "hijax", "ref", "mutable", "only", "allow_duplicates",
    ]  # fmt: skip
    kinds = [parameter.kind for parameter in parameters.values()]
    assert kinds[0] is inspect.Parameter.POSITIONAL_ONLY
    assert {*kinds[1:]} == {inspect.Parameter.KEYWORD_ONLY}


def test_variables_are_converted_and_the_input_stays():
    model = Parts()
    converted = nnx.with_vars(model, ref=True)
    assert type(converted) is Parts and converted is not model
    assert converted.a.ref and converted.b.ref and converted.a.tag == "x"
    assert isinstance(converted.a.get_raw_value(), jax.Ref)
    assert type(converted.b) is nnx.BatchStat
    assert not model.a.ref and isinstance(model.a.get_raw_value(), jax.Array)
    assert converted.array is model.array and converted.k == 1


def test_the_way_back_reads_the_refs():
    model = nnx.with_vars(Parts(), ref=True)
    model.a[...] = jnp.array([5.0, 6.0])
    back = nnx.with_vars(model, ref=False)
    model.a[...] = jnp.zeros(2)
    assert not back.a.ref and back.a[...].tolist() == [5.0, 6.0]


def test_what_is_as_requested_keeps_its_identity():
    model = Parts()
    some = nnx.with_vars(model, ref=True, only=nnx.Param)
    assert some.a is not model.a and some.b is model.b
    assert nnx.with_vars(some, ref=False).b is model.b
    assert nnx.with_vars(model).a is model.a


@pytest.mark.parametrize(
    "only", [nnx.Param, "x", nnx.PathContains("a"), lambda path, x: path == ("a",)]
)
def test_only_filters_by_path_and_variable(only):
    converted = nnx.with_vars(Parts(), ref=True, only=only)
    assert converted.a.ref and not converted.b.ref


@pytest.mark.parametrize(
    ("node", "get"),
    [
        (nnx.Param(jnp.ones(2)), lambda v: v),
        ([nnx.Param(jnp.ones(2)), 1], lambda x: x[0]),
        ((1, {"a": nnx.Param(jnp.ones(2))}), lambda x: x[1]["a"]),
        (nnx.State({"a": {"b": nnx.Param(jnp.ones(2))}}), lambda s: s["a"]["b"]),
        (nnx.List([nnx.Param(jnp.ones(2))]), lambda x: x[0]),
    ],
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
    model = nnx.with_vars(Parts(), ref=True)

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
    model = nnx.Dict(d=Parts())
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
    "update with Variables": lambda m: nnx.update(m, nnx.state(Parts())),
    "update_from_state": lambda m: m.a.update_from_state(nnx.Param(jnp.zeros(2))),
    "copy_from": lambda m: m.a.copy_from(nnx.Param(jnp.zeros(2))),
    "jax.jit closure": lambda m: jax.jit(lambda: m.a.set_value(0))(),
    "jax.jit argument": lambda m: jax.jit(lambda m: m.a.set_value(0))(m),
}


@pytest.mark.parametrize("ref", [False, True], ids=["arrays", "refs"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_read_only_variables_refuse_every_write(write, ref):
    model = nnx.with_vars(Parts(), ref=ref, mutable=False, only="x")
    with pytest.raises(ImmutableVariableError, match="Param.*read-only"):
        write(model)
    assert model.a[...].tolist() == [1.0, 2.0]
    assert model.b[...].tolist() == [3.0, 4.0]


def test_read_only_is_named_with_path_and_way_out():
    model = nnx.Dict(inner=nnx.with_vars(Parts(), mutable=False))
    with pytest.raises(ImmutableVariableError) as caught:
        nnx.update(model, {"inner": {"a": jnp.zeros(2)}})
    assert "at inner/a" in str(caught.value)
    assert "nnx.with_vars(node, mutable=True)" in str(caught.value)


@pytest.mark.parametrize("ref", [False, True], ids=["arrays", "refs"])
def test_mutable_undoes_read_only(ref):
    model = nnx.with_vars(Parts(), ref=ref)
    thawed = nnx.with_vars(nnx.with_vars(model, mutable=False), mutable=True)
    thawed.a[...] += 1
    assert thawed.a[...].tolist() == [2.0, 3.0]
    assert thawed.a.get_metadata() == model.a.get_metadata()
    assert jax.tree.structure(thawed) == jax.tree.structure(model)
    assert nnx.with_vars(model, mutable=True).a is model.a


def test_the_input_stays_writable():
    model = Parts()
    nnx.with_vars(model, mutable=False)
    model.a[...] += 1
    assert model.a[...].tolist() == [2.0, 3.0]


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), nnx.clone],
    ids=["deepcopy", "pickle", "clone"],
)
def test_copies_of_read_only_variables_are_read_only(duplicate):
    copied = duplicate(nnx.with_vars(Parts(), mutable=False))
    with pytest.raises(ImmutableVariableError):
        copied.a[...] += 1


def test_read_only_variables_are_read_and_differentiated():
    frozen = nnx.with_vars(nnx.state(Parts(), nnx.Param), mutable=False)
    grads = jax.grad(lambda state: (state.a[...] ** 2).sum())(frozen)
    assert grads.a[...].tolist() == [2.0, 4.0]


def test_an_update_by_read_only_state_leaves_the_target_writable():
    model = Parts()
    nnx.update(model, nnx.state(nnx.with_vars(Parts(), mutable=False)))
    model.a[...] += 1
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
    model = nnx.with_vars(Parts(), mutable=False, only="x")

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
        converted = nnx.vars_as(Parts(), ref=True)
    assert converted.a.ref
    assert inspect.signature(nnx.vars_as) == inspect.signature(nnx.with_vars)


@pytest.mark.parametrize(
    ("option", "holds"),
    [
        ({"is_hijax": True}, lambda v: v.hijax),
        ({"has_ref": True}, lambda v: v.ref),
        ({"is_mutable": False}, lambda v: v.get_metadata("mutable") is False),
    ],
)
def test_vars_as_takes_its_older_keywords(option, holds):
    with pytest.warns(DeprecationWarning):
        assert holds(nnx.vars_as(Parts(), **option).a)
